"""Compiled steps: one graph for each buffer shape and variant."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .changes import traits
from .cpu import SETTINGS, no_garbage_collection, start_toolchain
from .disk_cache import DiskCached
from .replay import Replayed

log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
"""Threads compile one after the other: the compiler's settings and counters are the process's."""


MAX_GRAPHS = 64
"""Graphs that a decoder holds: those used last."""


@dataclass
class GraphStats:
    """Counts of graphs compiled (`stored`: of these, loaded from disk), graph breaks and recompiles, and
    the seconds that first calls took."""

    compiled: int = 0
    stored: int = 0
    breaks: int = 0
    recompiles: int = 0
    seconds: float = 0.0

    def counts(self) -> dict[str, int]:
        """All but the seconds."""
        return {name: value for name, value in vars(self).items() if name != "seconds"}


@dataclass
class Graphs:
    """Compiled functions by key. With `enabled=False` functions run eagerly."""

    enabled: bool
    device: torch.device
    on_compile: Callable[[str], None] | None = None
    stats: GraphStats = field(default_factory=GraphStats)
    _compiled: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict)
    _traits: list[Any] | None = None

    def follow(self, model: object) -> None:
        """Drop all graphs where the model has been changed since the last call: a hook, a layer, a number of
        it. Its weights may change at any time."""
        if not self.enabled:
            return
        now = traits(model)
        if self._traits is not None and now != self._traits:
            log.warning("the model was changed: its decode steps are compiled anew")
            self._compiled.clear()
        self._traits = now

    def run(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        *args: Any,
        capture: bool = True,
        **static: Any,
    ) -> Any:
        """`function(*args, **static)` as one graph. The key begins with what the graph is for, and tells
        apart all shapes and all of `static`. `capture`: the function returns nothing and its buffers stay
        where they are, so that it can be captured, as a CUDA graph or for a CPU, and replayed."""
        if not self.enabled:
            return function(*args, **static)
        if capture and self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        if key in self._compiled:
            compiled = self._compiled[key] = self._compiled.pop(key)  # the latest used is the last one
            return compiled(*args)
        start = time.perf_counter()
        with _one_at_a_time, no_garbage_collection():
            compiled = self._compile(str(key[0]), function, static, capture)
            from torch._dynamo.utils import counters  # imported late: the compiler takes seconds to import

            breaks = counters["graph_break"].total()
            result = compiled(*args)
            self.stats.breaks += counters["graph_break"].total() - breaks
        self._compiled[key] = compiled  # once it has run: what is broken off is compiled anew
        if len(self._compiled) > MAX_GRAPHS:
            oldest = next(iter(self._compiled))
            log.info("more than %d graphs: that of %s is dropped", MAX_GRAPHS, oldest)
            del self._compiled[oldest]
        self.stats.seconds += time.perf_counter() - start
        return result

    def drop_captures(self) -> None:
        """Release the buffers that captures keep alive. The next run captures again."""
        for compiled in self._compiled.values():
            if isinstance(compiled, Replayed):
                compiled.drop_capture()

    def _compile(
        self, name: str, function: Callable[..., Any], static: dict[str, Any], capture: bool
    ) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        graphs, on_cpu = 0, self.device.type == "cpu"
        settings = {
            "triton.cudagraphs": capture and self.device.type == "cuda",
            # What it looks for are products that the library has a better form of. Here they are loops.
            "pattern_matcher": not on_cpu,
            **SETTINGS,
        }

        def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            nonlocal graphs
            graphs += 1
            self.stats.compiled += 1
            self.stats.recompiles += graphs > 1
            return compile_fx(module, inputs, config_patches=settings)

        def compile() -> Any:
            if self.on_compile is not None:
                self.on_compile(name)
            if on_cpu:
                start_toolchain()
            return torch.compile(
                _own(function, static),
                fullgraph=True,
                dynamic=False,
                backend=backend,
                # One graph a callable, and the key has told shapes apart: checking some thousand properties
                # of the model again at every step would take as long as several of its layers.
                options={"guard_filter_fn": lambda guards: [False for _ in guards]},
            )

        def on_load() -> None:
            self.stats.compiled += 1
            self.stats.stored += 1

        if not on_cpu:
            return compile()
        stored = DiskCached(compile, (function, static, settings), on_load)
        return Replayed(stored) if capture else stored


def check_ties(model: nn.Module) -> None:
    """Raise ValueError where one layer uses a tensor twice and the next of its class does not: the compiler,
    which traces layers that are alike once, would not see that they differ."""
    for parent in model.modules():
        seen: dict[type[nn.Module], tuple[str, set[tuple[str, ...]]]] = {}
        for name, child in parent.named_children():
            ties = _ties(child)
            first, expected = seen.setdefault(type(child), (name, ties))
            if ties != expected:
                names = " and ".join(sorted(ties ^ expected)[0])
                raise ValueError(
                    f"{type(child).__name__} {name} and {first} are not alike: only one of them has {names} "
                    "as one tensor. Such a model needs compile=False"
                )


def _ties(module: nn.Module) -> set[tuple[str, ...]]:
    """The names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for tensors in (module.named_parameters, module.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {tuple(same) for same in names.values() if len(same) > 1}


def _own(function: Callable[..., Any], static: dict[str, Any]) -> Callable[..., Any]:
    """A copy of the function with a code object of its own. The compiler counts all shapes of one code
    object as recompiles, and the ninth in a process is an error with `fullgraph`."""

    def step(*args: Any) -> Any:
        return function(*args, **static)

    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
