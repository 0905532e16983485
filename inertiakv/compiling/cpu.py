"""Compiler settings for good loops on CPUs."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator
from typing import Any

import torch

SETTINGS: dict[str, Any] = {
    # A multiplication and an addition in one instruction, as the library's products have it.
    "cpp.enable_floating_point_contract_flag": "fast",
    # The library's own loops have been compiled for these instructions and run with them: trying out in
    # seconds, one by one, whether a loop of this compiler can would tell nothing new.
    "cpp.vec_isa_ok": torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or None,
    # Checks of every input of every layer at every step, of shapes that are ours and do not change.
    "size_asserts": False,
    "alignment_asserts": False,
}
_LOOP = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* x) { at::vec::Vectorized<float>(1.0f).store(x); }
"""


@functools.cache
def start_toolchain() -> None:
    """Try out the C++ compiler and precompile its headers in a thread, while the first graph is traced: up
    to eight seconds the first time on a machine."""
    from torch._inductor import config  # imported late: the compiler takes seconds to import
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def compile_a_loop() -> None:
        # What goes wrong here goes wrong again where a graph needs it, and is raised there.
        with contextlib.suppress(Exception), config.patch(SETTINGS):
            CppPythonBindingsCodeCache.load_pybinding(["float*"], _LOOP)

    threading.Thread(target=compile_a_loop, name="toolchain").start()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage once after compiling instead of during it. The compiler makes millions of objects and
    keeps them; searching them for garbage took an eighth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.collect()
