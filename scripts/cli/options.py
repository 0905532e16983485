"""From dataclasses to a command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

import docstring_parser
import tyro

T = TypeVar("T")
N = TypeVar("N", int, float)

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""An option that is given or not."""


def partial(cls: type, doc: str, default: str = "") -> type:
    """A dataclass with the fields of another one, all of them optional: None is not given. `doc` heads them
    in the help, and `default` says what holds for those left out, where their own texts do not."""
    docs = {
        param.arg_name: param.description or "" for param in docstring_parser.parse_from_object(cls).params
    }
    hints = get_type_hints(cls)
    fields = []
    for field in dataclasses.fields(cls):
        text = " ".join(docs[field.name].split())
        option = tyro.conf.arg(help=text, help_behavior_hint=default)
        fields.append((field.name, Annotated[hints[field.name] | None, option], None))
    made = dataclasses.make_dataclass(f"{cls.__name__}Options", fields, frozen=True)
    made.__doc__ = doc
    return made


def given(options: Any) -> dict[str, Any]:
    """The fields of a `partial` that the user gave."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if value is not None}


def parse(cls: type[T], argv: Sequence[str] | None, *, prog: str, description: str) -> T:
    """An instance of a dataclass from a command line. Raises ValueError for one that is wrong."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(cls, args=argv, prog=prog, description=description, config=config)
    except SystemExit as error:
        if not error.code:
            raise  # --help
        raise ValueError(f"{_first_paragraph(complaint.getvalue())} (see --help)") from None


def _first_paragraph(box: str) -> str:
    """What is wrong, without the frame and the advice that tyro puts around it."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, line in enumerate(lines) if not line.strip("─")), len(lines))
    text = re.sub(r"^Error parsing ", "", " ".join(lines[:end])).rstrip(".")
    return re.sub(r"Expected one of \((.*)\)", _choices, text)


def _choices(expected: re.Match[str]) -> str:
    """The choices in order, without the None that stands for an option that is not given."""
    names = re.findall(r"'([^']*)'", expected[1])
    return "Choose from " + ", ".join(sorted(name for name in names if name != "None"))


def numbers(option: str, text: str | None, kind: Callable[[str], N]) -> list[N]:
    """The numbers that an option lists, each once. Raises ValueError for what is none."""
    try:
        return list(dict.fromkeys(map(kind, text.split(",")))) if text is not None else []
    except ValueError:
        raise ValueError(f"--{option} takes numbers joined by commas, got {text!r}") from None
