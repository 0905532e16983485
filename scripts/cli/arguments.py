"""A command line made from dataclasses: a field is an option, and its docstring the help text.

A class that inherits from dataclasses has a group of options for each of them; what it adds is no option.
Types: str, int, float, Path, bool (--x and --no-x), Literal (a choice), unions of these, tuples (several
words) and lists (joined by commas, "none" for an empty one). `Annotated[type, Option(...)]` adds what a type
cannot say.
Needs the standard library alone: bench.py also runs where there is little more than torch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import shlex
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_METAVARS = {int: "N", float: "X", Path: "FILE", str: "TEXT"}


@dataclass(frozen=True)
class Option:
    """What a field's type does not say of its option."""

    metavar: str | None = None
    default: str | None = None
    """What the help gives as the default, where it is not the field's own."""
    choices: Sequence[str] | None = None
    least: int | None = None
    """The smallest number."""
    positional: bool = False
    switch: bool = False
    """There is no --no-x."""
    repeat: bool = False
    """May be given several times, one item of the tuple each."""


@dataclass(frozen=True)
class FieldsOf:
    """Annotated[dict[str, Any], FieldsOf(cls, ...)]: an option for each field of `cls`. The dict has those
    that the user gave."""

    cls: type
    description: str


Switch = Annotated[bool, Option(switch=True)]
"""An option that is given or not."""
Count = Annotated[int, Option(least=1)]
Counts = Annotated[list[int], Option(least=1)]
Names = Annotated[list[str], Option("NAME,...|none")]


class _Help(argparse.RawDescriptionHelpFormatter):
    def _format_args(self, action: argparse.Action, default: str) -> str:
        return f"{action.metavar}..." if action.nargs == "+" else super()._format_args(action, default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse(
    cls: type[T],
    argv: Sequence[str] | None,
    description: str | None,
    script: str | None = None,
    epilog: str | None = None,
) -> T:
    """An instance of a dataclass from a command line; its field `command` is that of a `script`, if one is
    named. Raises ValueError for one that is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(
        prog=Path(sys.argv[0]).name,
        description=description,
        epilog=epilog,
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups = [base for base in cls.__bases__ if is_dataclass(base)]
    for base in groups:
        title = f"{base.__name__.removesuffix('Options').lower()} options"
        _add_options(parser, parser.add_argument_group(title, inspect.cleandoc(base.__doc__ or "")), base)
    if not groups:
        _add_options(parser, parser, cls)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_words(parser, known, unknown)
        near = difflib.get_close_matches(unknown[0].partition("=")[0], parser._option_string_actions, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    given = vars(known)
    for field, _, note in _fields(cls):
        if isinstance(note, FieldsOf):
            names = [of.name for of in fields(note.cls) if of.name in given]
            given[field.name] = {name: given.pop(name) for name in names}
    if script is not None:
        given["command"] = shlex.join(["python", f"scripts/{script}", *argv])
    return cls(**given)


def _refuse_words(parser: argparse.ArgumentParser, known: argparse.Namespace, unknown: list[str]) -> None:
    """Words without an option, where a prompt may be meant."""
    words = [getattr(known, action.dest, "") for action in parser._actions if not action.option_strings]
    if words and not unknown[0].startswith("-"):
        text = " ".join(filter(None, [*words, *unknown]))
        parser.error(f"unexpected words: {text}; did you mean --prompt {shlex.quote(text)}?")


def _fields(cls: type) -> Iterator[tuple[Field[Any], Any, Any]]:
    """The fields of a dataclass with their types, and the `Option` or `FieldsOf` that annotates them."""
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        kind, note = hints[field.name], None
        for part in (kind, *get_args(kind)):
            if get_origin(part) is Annotated:
                inner, note = get_args(part)[:2]
                kind = inner if part is kind else inner | None
        yield field, kind, note


def _add_options(
    parser: argparse.ArgumentParser, group: argparse._ActionsContainer, cls: type, defaults: bool = True
) -> None:
    docs = _docstrings(cls)
    for field, kind, note in _fields(cls):
        if isinstance(note, FieldsOf):
            inner = parser.add_argument_group(f"{field.name} options", note.description)
            _add_options(parser, inner, note.cls, defaults=False)
            continue
        option = note or Option()
        text = docs.get(field.name, "")
        if option.choices and option.metavar:
            text += f" {option.metavar} is one of {', '.join(option.choices)}."
        default = option.default or _default_text(field)
        if defaults and default:
            text += f" (default: {default})"
        _add_option(group, field, _kinds(kind), option, text.replace("%", "%%"))


def _add_option(
    group: argparse._ActionsContainer, field: Field[Any], kinds: list[Any], option: Option, text: str
) -> None:
    flag = f"--{field.name.replace('_', '-')}"
    if kinds == [bool]:
        action = "store_true" if option.switch else argparse.BooleanOptionalAction
        group.add_argument(flag, dest=field.name, action=action, help=text)
        return
    words = [kind for kind in kinds if get_origin(kind) not in (None, Literal, list)]
    items = [kind if get_origin(kind) in (None, Literal) else get_args(kind)[0] for kind in kinds]
    listed = any(get_origin(kind) is list for kind in kinds)
    choices = option.choices
    if len(items) == 1 and get_origin(items[0]) is Literal:
        choices = get_args(items[0])
    metavar = option.metavar or (None if choices else _metavar(items) + ",..." * listed)
    read = _reader(items, option.least, listed, metavar)
    settings: dict[str, Any] = {"type": read, "choices": choices, "help": text, "metavar": metavar}
    if words:
        nargs = 1 if option.repeat else "+"
        settings |= {"action": _Collect, "nargs": nargs, "const": len(words) < len(kinds)}
    if option.positional:
        settings.setdefault("nargs", "?")
        group.add_argument(field.name, **settings)
    else:
        required = field.default is field.default_factory is MISSING
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


def _reader(
    kinds: Sequence[Any], least: int | None, listed: bool, metavar: str | None
) -> Callable[[str], Any]:
    """Makes a value of the first of the types that the text fits, or a list of such values, each once."""

    def read(text: str) -> Any:
        for kind in kinds:
            if get_origin(kind) is Literal:
                if len(kinds) == 1 or text in get_args(kind):
                    return text
                continue
            with contextlib.suppress(ValueError):
                value = kind(text)
                if least is not None and value < least:
                    raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
                return value
        raise argparse.ArgumentTypeError(f"expected {metavar}, got {text!r}")

    def read_list(text: str) -> list[Any]:
        return [] if text == "none" else list(dict.fromkeys(map(read, text.split(","))))

    return read_list if listed else read


def _metavar(kinds: Sequence[Any]) -> str:
    names = [get_args(kind) if get_origin(kind) is Literal else (_METAVARS[kind],) for kind in kinds]
    return "|".join(dict.fromkeys(name for some in names for name in some))


def _default_text(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is True:
        return f"--{field.name.replace('_', '-')}"
    if value is MISSING or value in (None, False, (), []):
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
