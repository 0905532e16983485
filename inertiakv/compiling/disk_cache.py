"""Compiled passes kept on disk, in a folder of the compiler's own cache.

That cache knows what was made of a graph, but to ask it a pass must be traced, operation by operation: most
of what the first steps of a process take once everything has been compiled before. A pass that sees what it
saw in another process, by its fingerprint, is taken over as it was traced there.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .cpu import SETTINGS
from .fingerprint import UnknownError, fingerprint

Function = Callable[..., Any]
_CUSTOM = (
    *("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "custom_partitioner_fn"),
    *("post_grad_custom_pre_pass", "post_grad_custom_post_pass"),
    *("_pre_fusion_custom_pass", "_post_fusion_custom_pass"),
)
"""Settings of the compiler that are code."""


class DiskCached:
    """A pass that at its first call is loaded, or else compiled and written, or else, where it cannot be
    written, compiled."""

    def __init__(self, compile: Callable[[], Any], made_from: tuple[Any, ...], on_load: Function) -> None:
        """`compile` returns what `torch.compile` does. `made_from`: all but the arguments of the first call
        that its graph depends on. `on_load` is called after loading."""
        self._compile, self._made_from, self._on_load = compile, made_from, on_load
        self._function: Function | None = None

    def __call__(self, *args: Any) -> Any:
        if self._function is None:
            path = _path(self._made_from, args)
            self._function = self._load(path) or self._make(path, args)
        return self._function(*args)

    def _load(self, path: Path | None) -> Function | None:
        # Whatever a file holds, and whatever another version of the compiler says to it: there is a way on.
        with suppress(Exception):
            from torch._inductor import config  # imported late: the compiler takes seconds to import

            if path is not None and path.exists():
                # With other settings the loops would be compiled once more.
                content = path.read_bytes()
                digest, data = content[:32], content[32:]
                if digest != _digest(path, data):
                    return None
                with config.patch(SETTINGS):
                    loaded: Any = torch.compiler.load_compiled_function(io.BytesIO(data))
                loaded.disable_guard_check()
                self._on_load()
                return loaded
        return None

    def _make(self, path: Path | None, args: tuple[Any, ...]) -> Function:
        compiled = self._compile()
        if path is None:
            return compiled
        try:
            made = compiled.aot_compile((args, {}))
            made.disable_guard_check()
        except Exception:  # what is the user's fault is raised again where it is called
            return compiled
        unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        with suppress(Exception):
            path.parent.mkdir(exist_ok=True)
            made.save_compiled_function(str(unfinished))
            data = unfinished.read_bytes()
            unfinished.write_bytes(_digest(path, data) + data)
            unfinished.replace(path)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        return made


def _digest(path: Path, data: bytes) -> bytes:
    """Goes before the data of a file: neither damaged nor under another's name."""
    return hashlib.sha256(path.name.encode() + data).digest()


def _path(*made_from: Any) -> Path | None:
    """Of the pass, None where there is to be no cache, or nothing tells what the pass depends on."""
    with suppress(Exception):
        from torch._inductor import config  # imported late: the compiler takes seconds to import
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        if config.fx_graph_cache and not config.force_disable_caches:
            return Path(cache_dir()) / "inertiakv" / fingerprint(made_from, _surroundings())
    return None


def _surroundings() -> tuple[Any, ...]:
    """What the compiler looks at beside a pass. Raises UnknownError where that may be anything."""
    from torch._dynamo import config as tracing
    from torch._functorch import config as functions
    from torch._inductor import config as loops

    hooks = [name for name, held in vars(nn.modules.module).items() if name.startswith("_global_") and held]
    passes = [name for name in _CUSTOM if getattr(loops, name, None) is not None]
    if hooks or passes:
        raise UnknownError(f"what {', '.join(hooks + passes)} do")
    settings = [config.save_config_portable() for config in (tracing, functions, loops)]
    for each in settings:
        each.pop("debug_dir_root", None)  # the folder that a process was started in
    return (
        *(torch.__version__, torch.version.git_version, sys.version, platform.machine()),
        *(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()),
        *(torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        torch.are_deterministic_algorithms_enabled(),
        settings,
    )
