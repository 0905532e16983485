"""A command line made from dataclasses: a field is an option, and its docstring the help text.

A field that is itself a dataclass is a group of options. Types: str, int, float, Path, bool (--x and --no-x),
Literal (a choice), unions of these, and tuples (several words). `Annotated[type, Option(...)]` adds what a
type cannot say. Needs the standard library alone: bench.py also runs where there is little more than torch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
N = TypeVar("N", int, float)

_METAVARS = {int: "N", float: "X", Path: "FILE", str: "TEXT"}


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field's type does not say of its option."""

    metavar: str | None = None
    default: str | None = None
    """What the help gives as the default, where it is not the field's own."""
    choices: Sequence[str] | None = None
    parse: Callable[[str], Any] | None = None
    """Turns the option's text into the value. Raises argparse.ArgumentTypeError."""
    positional: bool = False
    switch: bool = False
    """There is no --no-x."""
    repeat: bool = False
    """May be given several times, one item of the tuple each."""


@dataclasses.dataclass(frozen=True)
class FieldsOf:
    """Annotated[dict[str, Any], FieldsOf(cls, ...)]: an option for each field of `cls`. The dict has those
    that the user gave."""

    cls: type
    description: str


Switch = Annotated[bool, Option(switch=True)]
"""An option that is given or not."""


class _Help(argparse.RawDescriptionHelpFormatter):
    def _format_args(self, action: argparse.Action, default: str) -> str:
        return f"{action.metavar}..." if action.nargs == "+" else super()._format_args(action, default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse(cls: type[T], argv: Sequence[str] | None, description: str | None) -> T:
    """An instance of a dataclass from a command line. Raises ValueError for one that is wrong."""
    parser = _Parser(
        prog=Path(sys.argv[0]).name,
        description=description,
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    _add_options(parser, parser, cls)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], parser._option_string_actions, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return _make(cls, vars(given))


def numbers(option: str, text: str | None, kind: Callable[[str], N]) -> list[N]:
    """The numbers that an option lists, each once. Raises ValueError for what is none."""
    try:
        return list(dict.fromkeys(map(kind, text.split(",")))) if text is not None else []
    except ValueError:
        raise ValueError(f"--{option} takes numbers joined by commas, got {text!r}") from None


def _fields(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any, Any]]:
    """The fields of a dataclass with their types, and the `Option` or `FieldsOf` that annotates them."""
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, note = hints[field.name], None
        if get_origin(kind) is Annotated:
            kind, note = get_args(kind)[:2]
        yield field, kind, note


def _add_options(
    parser: argparse.ArgumentParser, group: argparse._ActionsContainer, cls: type, defaults: bool = True
) -> None:
    docs = _docstrings(cls)
    for field, kind, note in _fields(cls):
        if isinstance(note, FieldsOf):
            inner = parser.add_argument_group(f"{field.name} options", note.description)
            _add_options(parser, inner, note.cls, defaults=False)
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            inner = parser.add_argument_group(f"{field.name} options", inspect.cleandoc(kind.__doc__ or ""))
            _add_options(parser, inner, kind)
        else:
            option = note or Option()
            text = docs.get(field.name, "")
            if option.choices and option.metavar:
                text += f" {option.metavar} is one of {', '.join(option.choices)}."
            default = option.default or _default_text(field)
            if defaults and default:
                text += f" (default: {default})"
            _add_option(group, field, kind, option, text.replace("%", "%%"))


def _add_option(
    group: argparse._ActionsContainer, field: dataclasses.Field[Any], kind: Any, option: Option, text: str
) -> None:
    flag = f"--{field.name.replace('_', '-')}"
    if _kinds(kind) == [bool]:
        action = "store_true" if option.switch else argparse.BooleanOptionalAction
        group.add_argument(flag, dest=field.name, action=action, help=text)
        return
    scalars = [part for part in _kinds(kind) if not _is_sequence(part)]
    items = [get_args(part)[0] if _is_sequence(part) else part for part in _kinds(kind)]
    choices = option.choices
    if len(items) == 1 and get_origin(items[0]) is Literal:
        choices = get_args(items[0])
    settings: dict[str, Any] = {"type": option.parse or _reader(items), "choices": choices, "help": text}
    settings["metavar"] = option.metavar or (None if choices else _metavar(items))
    if len(scalars) < len(items) and option.parse is None:
        settings |= {"action": _Collect, "nargs": 1 if option.repeat else "+", "const": bool(scalars)}
    required = field.default is field.default_factory is dataclasses.MISSING
    if option.positional:
        settings.setdefault("nargs", "?")
        group.add_argument(field.name, **settings)
    else:
        group.add_argument(flag, dest=field.name, required=required, **settings)


class _Collect(argparse.Action):
    """A tuple of the values, of all places where the option is given. `const`: one value stays as it is."""

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, __: str | None = None) -> None:
        if not self.const:
            values = (*getattr(namespace, self.dest, ()), *values)
        setattr(namespace, self.dest, values[0] if self.const and len(values) == 1 else tuple(values))


def _kinds(kind: Any) -> list[Any]:
    """What a type is a union of, without None."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [part for part in parts if part is not types.NoneType]


def _is_sequence(kind: Any) -> bool:
    return get_origin(kind) not in (None, Literal)


def _reader(kinds: Sequence[Any]) -> Callable[[str], Any]:
    """Makes a value of the first of the types that the text fits."""

    def read(text: str) -> Any:
        for kind in kinds:
            if get_origin(kind) is Literal:
                if len(kinds) == 1 or text in get_args(kind):
                    return text
                continue
            with contextlib.suppress(ValueError):
                return kind(text)
        raise argparse.ArgumentTypeError(f"expected {_metavar(kinds)}, got {text!r}")

    return read


def _metavar(kinds: Sequence[Any]) -> str:
    names = [get_args(kind) if get_origin(kind) is Literal else (_METAVARS[kind],) for kind in kinds]
    return "|".join(dict.fromkeys(name for some in names for name in some))


def _default_text(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is True:
        return f"--{field.name.replace('_', '-')}"
    if value is dataclasses.MISSING or value in (None, False, (), []):
        return ""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _docstrings(cls: type) -> dict[str, str]:
    """The strings below the fields of a dataclass, each in one line."""
    docs = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(base):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(doc))
                    ):
                        docs[name] = " ".join(doc.split())
    return docs


def _make(cls: type[T], given: dict[str, Any]) -> T:
    values: dict[str, Any] = {}
    for field, kind, note in _fields(cls):
        if isinstance(note, FieldsOf):
            names = [of.name for of in dataclasses.fields(note.cls)]
            values[field.name] = {name: given[name] for name in names if name in given}
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            values[field.name] = _make(kind, given)
        elif field.name in given:
            values[field.name] = given[field.name]
    return cls(**values)
