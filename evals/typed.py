"""Whether what was read from JSON is what an annotation says."""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

_KINDS: dict[type, str] = {
    **{str: "a text", bool: "true or false", int: "a whole number", float: "a number"},
    **{list: "a list", dict: "an object"},
}


@dataclass(frozen=True)
class Within:
    """Bounds of a number: `Annotated[int, Within(1)]`."""

    low: float = -sys.float_info.max
    high: float = sys.float_info.max

    def __str__(self) -> str:
        named = zip((self.low, self.high), ("from", "to"), strict=True)
        return "".join(f" {word} {bound:g}" for bound, word in named if abs(bound) < sys.float_info.max)


def check(value: Any, hint: Any, name: str = "") -> None:
    """Raise ValueError, naming the part and what it must be, for a value that an annotation does not allow.

    * `hint`: str, bool, int, float, one of the two with `Within`, a list or dict of them, a dataclass or
      TypedDict (which may lack what is NotRequired, and have more), any of it `| None`, or Any. A number is
      finite.
    * `name`: the value's, with dots: `model.name`.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType, NotRequired):
        options = get_args(hint)
        if value is not None or NoneType not in options:
            check(value, next(option for option in options if option is not NoneType), name)
    elif hint is not Any:
        kind, bounds = get_args(hint) if origin is Annotated else (origin or hint, Within())
        kind = dict if _has_fields(kind) else kind
        if not _is(kind, value, bounds):
            wanted = f"{_KINDS[kind]}{bounds}"
            raise ValueError(f"{name or 'it'} must be {wanted}, got {reprlib.repr(value)}")
        for key, part, of in _parts(value, hint, name):
            check(part, of, f"{name}.{key}".lstrip("."))


def _has_fields(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or is_typeddict(hint)


def _is(kind: type, value: Any, bounds: Within) -> bool:
    if kind not in (int, float):
        return isinstance(value, kind)
    number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return number and bounds.low <= value <= bounds.high


def _parts(value: Any, hint: Any, name: str) -> Iterator[tuple[object, Any, Any]]:
    """Key, value and annotation of all that is in a list or an object."""
    if _has_fields(hint):
        hints = get_type_hints(hint, include_extras=True)
        missing = [key for key, of in hints.items() if key not in value and get_origin(of) is not NotRequired]
        if missing:
            raise ValueError("it has no " + ", ".join(f"{name}.{key}".lstrip(".") for key in missing))
        yield from ((key, value[key], of) for key, of in hints.items() if key in value)
    elif get_origin(hint) is dict:
        yield from ((key, part, get_args(hint)[1]) for key, part in value.items())
    elif get_origin(hint) is list:
        yield from ((index, part, get_args(hint)[0]) for index, part in enumerate(value))
