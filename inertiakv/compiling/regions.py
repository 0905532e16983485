"""Layers as regions: the compiler traces and compiles equal ones once.

It compares the arguments of each call with those it knows. Nested tuples make that slower than everything
else about a known layer, so arguments are flattened first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
Kinds = tuple[type[Any], ...]
"""The named tuples that may occur."""

_SUPPORTED = inspect.signature(torch.compiler.nested_compile_region).parameters
# Layers that read their own index, say, are all unlike: slow to compile, but no error.
_ANY_NUMBER: dict[str, Any] = {"max_reuse_entries": 1 << 20} if "max_reuse_entries" in _SUPPORTED else {}


def region(function: F) -> F:
    """Decorator: calls with like arguments are compiled once."""
    return torch.compiler.nested_compile_region(**_ANY_NUMBER)(function)


def flatten(*values: Any) -> list[Any]:
    """The layout of nested tuples as a string, followed by the leaves."""
    leaves: list[Any] = []
    return [_layout(values, leaves), *leaves]


def unflatten(flat: tuple[Any, ...], kinds: Kinds = ()) -> tuple[Any, tuple[Any, ...]]:
    """The values, and what is left of `flat` after them."""
    by_name, words, leaves = {kind.__name__: kind for kind in kinds}, iter(flat[0].split()), iter(flat[1:])
    return _value(words, leaves, by_name), tuple(leaves)


# Not functions within those above: one that calls itself there would be garbage that refers to itself, and
# keep a layer's tensors until Python collects such garbage.
def _layout(value: Any, leaves: list[Any]) -> str:
    if not isinstance(value, tuple):
        leaves.append(value)
        return "."
    return " ".join((type(value).__name__, str(len(value)), *[_layout(part, leaves) for part in value]))


def _value(words: Iterator[str], leaves: Iterator[Any], by_name: dict[str, type[Any]]) -> Any:
    name = next(words)
    if name == ".":
        return next(leaves)
    parts = tuple([_value(words, leaves, by_name) for _ in range(int(next(words)))])
    return by_name[name](*parts) if name in by_name else parts
