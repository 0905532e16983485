"""A hash of everything a function depends on: its arguments, its code, and whatever that code refers to.

A compiled function can be reused in another process if the hash is the same there. Tensors count with
everything but their values. Code counts as it is in memory, not as in its file, so a function that was
replaced at run time changes the hash. This covers this project's code and, by version, the libraries it
uses. If anyone else's code takes part, there is no fingerprint, since nothing tells what that code depends
on.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import sys
import types
from collections import deque
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import CustomOpDef

from ..config import EvictionConfig

_PLAIN = (bool, int, float, complex, str, bytes, Fraction, PurePath, torch.dtype, torch.device, enum.Enum)
_HOLDERS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinFunctionType: ("__qualname__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    functools.cached_property: ("func",),
    functools._lru_cache_wrapper: ("__wrapped__",),
}
"""Attributes that say what such an object does."""
_SAID_BY_NAME = (
    *(types.GenericAlias, types.UnionType, types.MemberDescriptorType, types.GetSetDescriptorType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType),
    type(vars(NamedTuple("_", [("field", int)]))["field"]),
)
_BESIDE_ITS_BODY = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__orig_bases__"),
    *("__parameters__", "__slotnames__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__"),
}
"""What a class has that nobody wrote, or that its passes do not depend on."""
_PROJECT = {"inertiakv"}
_LIBRARIES = {*sys.stdlib_module_names, "einops", "numpy", "torch"}


class UnknownError(TypeError):
    """Something whose equality across processes cannot be decided."""


def fingerprint(*values: Any) -> str:
    """Equal for equal values, in this process or another. Raises UnknownError for values whose equality
    cannot be decided.

    An object can list attributes that no compiled function reads in `apart_from_graphs`.
    """
    walk = _Walk()
    walk.take(values)
    while walk.later:
        code = walk.later.popleft()
        walk.take_class(code) if isinstance(code, type) else walk.take_function(code)
    return walk.hash.hexdigest()


class _Walk:
    """Visits values in a fixed order. Functions and classes wait in a queue, since they refer to one
    another more deeply than calls can nest."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._met: dict[int, tuple[int, Any]] = {}  # by id; held, so that no id serves twice
        self._memory: dict[int, int] = {}  # by address
        self._spaces: set[tuple[int, frozenset[str]]] = set()
        self.later: deque[FunctionType | type] = deque()

    def take(self, value: Any) -> None:
        if value is None or value is ... or isinstance(value, _PLAIN):
            self._note(type(value).__qualname__, repr(value))
        elif isinstance(value, EvictionConfig):
            self.take(value.graph_key)
        elif isinstance(value, dict):
            self._note(type(value).__qualname__, len(value))
            self._take_items(value.items())
        elif isinstance(value, tuple | list | set | frozenset):
            self._note(len(value))
            self.take(type(value))
            for part in value if isinstance(value, tuple | list) else sorted(value, key=repr):
                self.take(part)
        elif id(value) in self._met:
            self._note("again", self._met[id(value)][0])
        else:
            self._met[id(value)] = len(self._met), value
            self._take_new(value)

    def _take_new(self, value: Any) -> None:
        if isinstance(value, FunctionType | type):
            self._note(value.__module__, value.__qualname__)
            self.later.append(value)
        elif isinstance(value, Tensor):
            self._take_tensor(value)
        elif type(value) in _HOLDERS:
            self.take((type(value), *(getattr(value, name) for name in _HOLDERS[type(value)])))
        elif isinstance(value, ModuleType):
            self._note(value.__name__, _is_ours(value.__name__), _version(value.__name__))
        elif isinstance(value, logging.Logger):
            self._note(value.name)
        elif isinstance(value, _SAID_BY_NAME) or type(value).__module__ == "typing":
            self._note(repr(value))
        elif isinstance(value, CustomOpDef):
            self._note(repr(value))
            self.take([held for held in vars(value).values() if isinstance(held, FunctionType)])
        elif isinstance(value, nn.Module) or (
            _is_ours(type(value).__module__) and hasattr(value, "__dict__")
        ):
            self.take(type(value))
            apart = getattr(value, "apart_from_graphs", ())
            self._take_items((name, held) for name, held in vars(value).items() if name not in apart)
        else:
            raise UnknownError(f"{type(value).__module__}.{type(value).__qualname__}: {value!r:.80}")

    def _take_tensor(self, tensor: Tensor) -> None:
        """Whether tensors share memory counts, too."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            raise UnknownError(f"{type(tensor).__qualname__} in layout {tensor.layout}")
        place = self._memory.setdefault(tensor.data_ptr(), len(self._memory)) if tensor.numel() else None
        about = (type(tensor).__qualname__, tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        self._note(*map(str, about), tensor.requires_grad, tensor.is_inference(), place)

    def take_function(self, function: FunctionType) -> None:
        home = str(function.__globals__.get("__name__"))
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        if not _is_ours(home):  # a library's wrapper, say, around one of ours
            self._note(home, _version(home))
            self.take([cell for cell in cells if isinstance(cell, FunctionType)])
            return
        names = self._take_code(function.__code__)
        self.take((function.__defaults__, function.__kwdefaults__, cells))
        self._take_named(names, function.__globals__)
        for name in sorted(names):  # what is imported as it runs
            for imported in (name, f"{function.__globals__.get('__package__')}.{name}"):
                if imported.partition(".")[0] in _PROJECT and imported in sys.modules:
                    self._take_named(names, vars(sys.modules[imported]))

    def _take_named(self, names: set[str], space: dict[str, Any]) -> None:
        """What names refer to in a module and in modules that it refers to. Of a library only functions
        count: they may have been replaced."""
        met = id(space), frozenset(names)
        if met in self._spaces:
            return
        self._spaces.add(met)
        ours = _is_ours(space["__name__"])
        for name in sorted(name for name in names if name in space):
            if ours or isinstance(space[name], FunctionType):
                self._take_items([(name, space[name])])
            if isinstance(space[name], ModuleType):
                self._take_named(names, vars(space[name]))

    def _take_code(self, code: CodeType) -> set[str]:
        """Returns the names that it uses."""
        self._note(code.co_code, code.co_exceptiontable, code.co_names, code.co_varnames, code.co_freevars)
        self._note(code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        names = set(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                names |= self._take_code(constant)
            else:
                self.take(constant)
        return names

    def take_class(self, kind: type) -> None:
        if not _is_ours(kind.__module__):
            self._note(_version(kind.__module__))
            return
        beside = _BESIDE_ITS_BODY
        if dataclasses.is_dataclass(kind):
            beside = beside | {n for n, v in vars(kind).items() if _is_generated(v)}
        self.take(kind.__bases__)
        self._take_items((name, held) for name, held in sorted(vars(kind).items()) if name not in beside)

    def _take_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for name, value in items:
            self.take(name)
            self.take(value)

    def _note(self, *parts: Any) -> None:
        self.hash.update(repr(parts).encode())


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_generated(value: Any) -> bool:
    """Whether this is a method that a dataclass was given."""
    return isinstance(value, FunctionType) and value.__code__.co_filename == "<string>"


@functools.cache
def _is_ours(module: str) -> bool:
    """True for this project's code, False for a known library's. Raises UnknownError for any other."""
    root = module.partition(".")[0]
    if root in _LIBRARIES or root.startswith("namedtuple_"):  # the methods of a NamedTuple
        return False
    file = getattr(sys.modules.get(root), "__file__", None)
    if root not in _PROJECT or file is None or Path(file).parents[1] != Path(__file__).parents[2]:
        raise UnknownError(f"code of {module}")
    return True


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", None))
