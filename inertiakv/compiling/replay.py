"""Capture and replay of a compiled step on a CPU: what CUDA graphs are for a GPU.

The compiler writes a Python module whose functions allocate intermediate buffers and call compiled loops.
Where loops take a fraction of a millisecond, allocating hundreds of small tensors costs as much as several
layers. All addresses are fixed here, so one run tells which loops run on which tensors. A replay makes just
these calls.

SmolLM2-135M in bfloat16 on two cores, torch 2.13: 17.9 ms a step instead of 22.1. `cpp_wrapper`
cannot compile regions yet; an AOTInductor package without regions took 20.7 where this took 19.1.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)
Call = tuple[Callable[..., None], list[Any]]
"""A compiled loop, and what it takes."""

_one_at_a_time = threading.Lock()
_HARMLESS = {"empty_strided_cpu", "reinterpret_tensor", "assert_size_stride", "args.clear"}
"""What a generated function may call beside loops and regions for a replay of the loops to be all of it."""


class Replayed:
    """A compiled function that is run once, then captured, then replayed as long as its arguments are the
    same objects with the same parameters and buffers at the same addresses. What cannot be replayed runs as
    compiled."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled = compiled
        self._module: _Module | None = None
        self._layouts: list[Any] | None = None  # of the model's tensors, at the first run
        self._calls: list[Call] | None = None
        self.drop_capture()

    @property
    def replays(self) -> bool:
        """Whether the next call is a replay, as long as nothing moves."""
        return self._calls is not None

    def drop_capture(self) -> None:
        """Drop the captured calls, which keep all buffers alive that they read and write."""
        self._calls = None
        self._args: tuple[Any, ...] = ()
        self._parts: list[tuple[dict[str, Any], str, nn.Module | None]] = []
        self._places: list[tuple[dict[str, Any], str]] = []

    def __call__(self, *args: Any) -> Any:
        if self._calls is not None and self._unmoved(args):
            for loop, tensors in self._calls:
                loop(*tensors)
            return None
        if self._module is not None or self._layouts is None:
            self._remember(args)
        result, calls = None, None
        with _loaded_modules() as modules:
            if self._module is None:
                result = self._compiled(*args)
            else:
                calls = self._module.capture(lambda: self._compiled(*args))
        if modules:  # it was compiled now; without a model nothing would say that weights have moved
            self._module = _Module.of(modules) if isinstance(args[0], nn.Module) else None
        elif calls:
            self._calls = calls
        if self._calls is None:
            self.drop_capture()
        return result

    def _remember(self, args: tuple[Any, ...]) -> None:
        modules = [module for arg in args if isinstance(arg, nn.Module) for module in arg.modules()]
        tables = [table for module in modules for table in (module._parameters, module._buffers)]
        self._args, self._calls = args, None
        self._parts = [(m._modules, name, part) for m in modules for name, part in m._modules.items()]
        self._places = [(t, name) for t in tables for name, tensor in t.items() if tensor is not None]
        tensors = [table[name] for table, name in self._places]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if self._layouts is None:
            self._layouts = layouts
        elif layouts != self._layouts:
            raise ValueError("a tensor of the model has another shape, layout or dtype: make a new Decoder")

    def _unmoved(self, args: tuple[Any, ...]) -> bool:
        return (
            all(mine is theirs for mine, theirs in zip(self._args, args, strict=True))
            and all(table[name] is part for table, name, part in self._parts)
            and [table[name].data_ptr() for table, name in self._places] == self._addresses
        )


class _Module:
    """A module that the compiler wrote, whose functions only allocate buffers and call loops."""

    def __init__(self, module: ModuleType, loops: set[str], regions: set[str]) -> None:
        self._names = vars(module)
        self._loops, self._regions = loops, regions

    @classmethod
    def of(cls, modules: list[ModuleType]) -> _Module | None:
        """None where there is not exactly one module, or its functions do anything else; the log says
        which."""
        try:
            if len(modules) != 1:
                raise ValueError(f"{len(modules)} modules were compiled, and not one")
            return cls._read(modules[0])
        except ValueError as reason:
            log.info("a compiled step runs as it is, without replay: %s", reason)
            return None

    @classmethod
    def _read(cls, module: ModuleType) -> _Module:
        tree = ast.parse(inspect.getsource(module))
        loops = {
            node.targets[0].id
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and ast.unparse(node.value).startswith("async_compile.cpp_pybinding(")
        }
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        runner = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Runner"), None)
        if runner is None:
            raise ValueError("the compiled module has no class Runner")
        entry = [n for n in runner.body if isinstance(n, ast.FunctionDef) and n.name == "call"]
        called = {name for function in entry for name in _calls(function)}
        regions = called & functions.keys()
        called |= {name for region in regions for name in _calls(functions[region])}
        if {ast.unparse(n) for f in entry for n in ast.walk(f) if isinstance(n, ast.Return)} != {"return ()"}:
            raise ValueError("it returns something")
        if unknown := called - loops - regions - _HARMLESS:
            raise ValueError(f"it calls {', '.join(sorted(unknown))}")
        return cls(module, loops, regions)

    def capture(self, run: Callable[[], None]) -> list[Call]:
        """Run the step and note its calls.

        The notes keep the loops' tensors alive. All runs of a region share one set of intermediate buffers,
        as they would through the allocator.
        """
        thread = threading.get_ident()
        calls: list[Call] = []
        templates: dict[str, list[Call]] = {}

        def noted(loop: Callable[..., None]) -> Callable[..., None]:
            def call(*tensors: Any) -> None:
                if threading.get_ident() == thread:  # another decoder may run the same module meanwhile
                    calls.append((loop, list(tensors)))
                loop(*tensors)

            return call

        def shared(name: str, region: Callable[[list[Any]], tuple[Any, ...]]) -> Callable[..., Any]:
            def call(args: list[Any]) -> tuple[Any, ...]:
                if threading.get_ident() != thread:
                    return region(args)
                first, outside = len(calls), _storages(args)
                outputs = region(args)
                outside |= _storages(outputs)
                template = templates.setdefault(name, calls[first:])
                for (_, mine), (_, theirs) in zip(calls[first:], template, strict=True):
                    mine[:] = [
                        tensor if _storages([tensor]) <= outside else other
                        for tensor, other in zip(mine, theirs, strict=True)
                    ]
                return outputs

            return call

        with _one_at_a_time:
            originals = {name: self._names[name] for name in self._loops | self._regions}
            self._names.update({name: noted(self._names[name]) for name in self._loops})
            self._names.update({name: shared(name, self._names[name]) for name in self._regions})
            try:
                run()
            finally:
                self._names.update(originals)
        return calls


_loading = threading.local()
"""Its `modules`: those that the compiler has loaded for this thread, while they are collected."""


@contextmanager
def _loaded_modules() -> Iterator[list[ModuleType]]:
    """Collects the modules that the compiler loads in the block, new ones and cached ones."""
    _listen()
    modules: list[ModuleType] = []
    _loading.modules = modules
    try:
        yield modules
    finally:
        del _loading.modules


@functools.cache
def _listen() -> None:
    """Hook into the compiler's loading of modules, once a process."""
    from torch._inductor import codecache  # imported late: the compiler takes seconds to import

    cache: Any = getattr(codecache, "PyCodeCache", None)
    load = getattr(cache, "load_by_key_path", None)
    if load is None:
        log.info("torch %s does not say what its compiler loads: no replay", torch.__version__)
        return

    def noted(*args: Any, **kwargs: Any) -> ModuleType:
        module = load(*args, **kwargs)
        getattr(_loading, "modules", []).append(module)
        return module

    cache.load_by_key_path = noted


def _calls(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}


def _storages(values: list[Any] | tuple[Any, ...]) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, torch.Tensor)}
