"""Changes of a model that its compiled steps would not see."""

from __future__ import annotations

from typing import Any

from torch import nn

_LEFT_OUT = ("_parameters", "_buffers", "_non_persistent_buffers_set", "training")
"""Tensors are followed by the steps themselves."""


def traits(model: Any) -> list[Any]:
    """What a graph of the model is made from beside its tensors: the modules, their classes and methods,
    hooks and attributes. Two lists are equal where nothing has changed."""
    if not isinstance(model, nn.Module):
        return []
    found: list[Any] = []
    for name, module in model.named_modules():
        found += (name, type(module), type(module).forward)
        for attribute, value in vars(module).items():
            no_hooks = isinstance(value, dict) and not value
            if not no_hooks and attribute not in _LEFT_OUT:
                found += (attribute, _trait(value))
    return found


def _trait(value: Any) -> Any:
    """The value where it is plain, else something that is equal to the same object alone."""
    if isinstance(value, (int, float, str, bool, type(None))):
        return type(value), value
    if isinstance(value, dict):
        return [(key, _trait(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_trait(item) for item in value]
    return _Same(value)


class _Same:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]
