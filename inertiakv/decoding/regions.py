"""Arguments of compiled regions: tensors, modules and constants side by side.

The compiler traces layers that are alike once, which it finds out by comparing what they take. Looking into
nested tuples for that takes it longer, layer by layer, than all the rest of a layer that it knows already.
"""

from __future__ import annotations

from typing import Any

Kinds = tuple[type[Any], ...]
"""The named tuples that may occur."""


def flat(*values: Any) -> list[Any]:
    """What `nested` makes `values` of again: how tuples and dicts hold the rest, as one string, and the
    rest."""
    layout, leaves = _flat(values)
    return [layout, *leaves]


def nested(flat: tuple[Any, ...], kinds: Kinds = ()) -> tuple[Any, tuple[Any, ...]]:
    """The values, and what is left of `flat` after them."""
    values, _, rest = _nested(flat[0].split(), flat[1:], kinds)
    return values, rest


def _flat(value: Any) -> tuple[str, list[Any]]:
    if isinstance(value, dict):
        layout, leaves = _flat((*value.keys(), *value.values()))
        return f"dict {layout}", leaves
    layout, leaves = f"{type(value).__name__} {len(value)}", []
    for part in value:
        if isinstance(part, dict | tuple):
            inner, more = _flat(part)
            layout += f" {inner}"
            leaves += more
        else:
            layout += " ."
            leaves.append(part)
    return layout, leaves


def _nested(
    layout: list[str], leaves: tuple[Any, ...], kinds: Kinds
) -> tuple[Any, list[str], tuple[Any, ...]]:
    """The first value, and what is left of both."""
    name, layout = layout[0], layout[1:]
    if name == ".":
        return leaves[0], layout, leaves[1:]
    if name == "dict":
        items, layout, leaves = _nested(layout, leaves, kinds)
        half = len(items) // 2
        return dict(zip(items[:half], items[half:], strict=True)), layout, leaves
    size, layout = int(layout[0]), layout[1:]
    parts: tuple[Any, ...] = ()
    for _ in range(size):
        part, layout, leaves = _nested(layout, leaves, kinds)
        parts = (*parts, part)
    kind = {kind.__name__: kind for kind in kinds}.get(name)
    return (parts if kind is None else kind(*parts)), layout, leaves
