"""Whether what was read from JSON has the form that it must have."""

from __future__ import annotations

import reprlib
from types import UnionType
from typing import Any, get_args

_KINDS: dict[type, str] = {
    **{str: "a text", bool: "true or false", int: "a whole number", float: "a number"},
    **{list: "a list", dict: "an object"},
}


def check(value: Any, form: Any, name: str = "") -> None:
    """Raise ValueError, naming the part, for a value of another form. A form is a type, `{"key": form}` with
    what must be there, `{str: form}` or `[form]` with any number of parts, and one of these or None as
    `type | None` or `(form, None)`."""
    if isinstance(form, UnionType | tuple):
        if value is None:
            return
        form = (form if isinstance(form, tuple) else get_args(form))[0]
    kind = form if isinstance(form, type) else type(form)
    allowed: Any = (int, float) if kind is float else kind
    if not isinstance(value, allowed):
        raise ValueError(f"{name or 'it'} must be {_KINDS[kind]}, got {reprlib.repr(value)}")
    parts: dict[Any, Any] = {}
    if isinstance(form, list):
        value = dict(enumerate(value))
        parts = dict.fromkeys(value, form[0])
    elif isinstance(form, dict):
        parts = dict.fromkeys(value, form[str]) if str in form else form
    paths = {key: f"{name}.{key}".lstrip(".") for key in parts}
    if missing := [path for key, path in paths.items() if key not in value]:
        raise ValueError(f"it has no {', '.join(missing)}")
    for key, path in paths.items():
        check(value[key], parts[key], path)
