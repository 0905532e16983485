"""Compiled functions kept on disk, in a folder of the compiler's own cache.

The compiler's cache is asked with a traced graph, and tracing is most of what a warm start takes. Here a
function that would see what it saw in another process, by its fingerprint, is loaded without tracing it.

SmolLM2-135M in bfloat16 on two cores, torch 2.13: 3.1 s until the first compiled step has run, with the
compiler's cache alone 7.0, with `torch.compiler.load_cache_artifacts` 11.6. `caching_precompile` comes near
(3.3), but computes other bits, since it drops the settings that a graph was compiled with.
"""

from __future__ import annotations

import hashlib
import io
import logging
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

log = logging.getLogger(__name__)
MAX_BYTES = 2**30
"""Of all files together."""
_CUSTOM = (
    *("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "custom_partitioner_fn"),
    *("post_grad_custom_pre_pass", "post_grad_custom_post_pass"),
    *("_pre_fusion_custom_pass", "_post_fusion_custom_pass"),
)
"""Settings of the compiler that are code."""


class DiskCached:
    """A function that at its first call is loaded, or else compiled and written. Where this torch cannot load
    and write, or nothing tells what the function depends on, it is compiled as ever, and the log says why."""

    def __init__(
        self, compile: Callable[[], Any], made_from: tuple[Any, ...], on_load: Callable[[], None]
    ) -> None:
        """`compile` returns what `torch.compile` does. `made_from`: all but the arguments of the first call
        that its graph depends on. `on_load` is called after loading."""
        self._compile, self._made_from, self._on_load = compile, made_from, on_load
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._function is None:
            path = _path(self._made_from, args)
            self._function = self._load(path) or self._make(path, args)
        return self._function(*args)

    def _load(self, path: Path | None) -> Callable[..., Any] | None:
        if path is None or not path.exists():
            return None
        try:
            from torch._inductor import config  # imported late: the compiler takes seconds to import

            content = path.read_bytes()
            if content[:32] != _digest(path, data := content[32:]):
                raise ValueError("damaged")
            with config.patch(SETTINGS):  # with other settings the loops would be compiled once more
                loaded: Any = torch.compiler.load_compiled_function(io.BytesIO(data))
            loaded.disable_guard_check()
            os.utime(path)  # it is one of those used last
        except Exception as error:  # whatever a file holds, there is a way on
            log.info("%s cannot be loaded (%s): compiling", path, error)
            return None
        self._on_load()
        return loaded

    def _make(self, path: Path | None, args: tuple[Any, ...]) -> Callable[..., Any]:
        compiled = self._compile()
        if path is None:
            return compiled
        try:
            made = compiled.aot_compile((args, {}))
            made.disable_guard_check()
        except Exception as error:  # what is the user's fault is raised again where it is called
            log.info("a compiled function cannot be kept on disk (%s)", error)
            return compiled
        unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(exist_ok=True)
            made.save_compiled_function(str(unfinished))
            data = unfinished.read_bytes()
            unfinished.write_bytes(_digest(path, data) + data)
            unfinished.replace(path)
            _prune(path.parent)
        except Exception as error:  # a full disk, say
            log.info("%s cannot be written (%s)", path, error)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        return made


def _prune(folder: Path) -> None:
    """Remove the files that were used longest ago, beyond what the folder may hold."""
    held = 0
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True):
        held += file.stat().st_size
        if held > MAX_BYTES:
            file.unlink(missing_ok=True)


def _digest(path: Path, data: bytes) -> bytes:
    """The first bytes of a file, which detect damage and renaming."""
    return hashlib.sha256(path.name.encode() + data).digest()


def _path(*made_from: Any) -> Path | None:
    """Where the function is kept; None where there is to be no cache, or nothing tells what it depends on."""
    try:
        from torch._inductor import config  # imported late: the compiler takes seconds to import
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        if not config.fx_graph_cache or config.force_disable_caches:
            return None
        if not hasattr(torch.compiler, "load_compiled_function"):
            raise UnknownError(f"torch {torch.__version__} without torch.compiler.load_compiled_function")
        return Path(cache_dir()) / "inertiakv" / fingerprint(made_from, _surroundings())
    except Exception as error:  # nothing that a cache is worth failing for
        log.info("a compiled function is not kept on disk: it depends on %s", error)
        return None


def _surroundings() -> tuple[Any, ...]:
    """What the compiler depends on beside the function and its arguments. Raises UnknownError where that
    may be anything."""
    from torch._dynamo import config as tracing
    from torch._functorch import config as functions
    from torch._inductor import config as loops

    hooks = [name for name, held in vars(nn.modules.module).items() if name.startswith("_global_") and held]
    settings = [config.save_config_portable() for config in (tracing, functions, loops)]
    passes = [name for name in _CUSTOM if getattr(loops, name, None) is not None]
    if hooks or passes:
        raise UnknownError(f"what {', '.join(hooks + passes)} do")
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
