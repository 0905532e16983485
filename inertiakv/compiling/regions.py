"""Layers as regions: the compiler traces and compiles equal ones once.

It compares the arguments of each call with those it knows. Nested tuples make that slower than everything
else about a known layer, so arguments are flattened first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    layout, leaves = _flatten(values)
    return [layout, *leaves]


def unflatten(flat: tuple[Any, ...], kinds: Kinds = ()) -> tuple[Any, tuple[Any, ...]]:
    """The values, and what is left of `flat` after them."""
    values, _, rest = _unflatten(flat[0].split(), flat[1:], kinds)
    return values, rest


def _flatten(value: tuple[Any, ...]) -> tuple[str, list[Any]]:
    layout, leaves = f"{type(value).__name__} {len(value)}", []
    for part in value:
        if isinstance(part, tuple):
            inner, more = _flatten(part)
            layout += f" {inner}"
            leaves += more
        else:
            layout += " ."
            leaves.append(part)
    return layout, leaves


def _unflatten(
    layout: list[str], leaves: tuple[Any, ...], kinds: Kinds
) -> tuple[Any, list[str], tuple[Any, ...]]:
    """The first value, and what is left of both."""
    name, layout = layout[0], layout[1:]
    if name == ".":
        return leaves[0], layout, leaves[1:]
    size, layout = int(layout[0]), layout[1:]
    parts: tuple[Any, ...] = ()
    for _ in range(size):
        part, layout, leaves = _unflatten(layout, leaves, kinds)
        parts = (*parts, part)
    kind = {kind.__name__: kind for kind in kinds}.get(name)
    return (parts if kind is None else kind(*parts)), layout, leaves
