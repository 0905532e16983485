"""Running what the compiler wrote for CUDA on tensors of a CPU, in Triton's interpreter.

Needs `TRITON_INTERPRET=1` before Triton is imported. Three of the interpreter's defects are mended here:
products of bfloat16 tiles multiply their bits, float32 is cut instead of rounded to bfloat16, and library
functions give None.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

BLOCK = 128
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(np, name)
    for name in (
        "sqrt",
        "exp",
        "exp2",
        "log",
        "log2",
        "log1p",
        "cos",
        "sin",
        "tanh",
        "floor",
        "ceil",
        "isnan",
        "isinf",
    )
} | {"rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power, "abs": np.abs}


def mend() -> None:
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.runtime.triton_heuristics as heuristics
    import triton.language as tl
    import triton.runtime.interpreter as interpreter
    from triton.runtime.interpreter import TensorHandle

    class Library:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            function = _FUNCTIONS[name]

            def call(*args: Any) -> Any:
                first = args[0]
                data = [np.asarray(x.handle.data if isinstance(x, tl.tensor) else x) for x in args]
                with np.errstate(all="ignore"):
                    result = np.asarray(function(*data)).astype(first.handle.data.dtype)
                return tl.tensor(TensorHandle(result, first.dtype.scalar), first.type)

            return call

    def widen(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def narrow(values: Any) -> Any:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)

    nearest = (None, interpreter._ir.ROUNDING_MODE.RTNE)
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return widen(values).reshape(values.shape)
        if (source, target) == (tl.float32, tl.bfloat16) and rounding in nearest:
            return narrow(values).reshape(values.shape)
        return convert(values, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        def wide(x: Any) -> Any:
            return TensorHandle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

        return dot(self, wide(a), wide(b), *more)

    run = heuristics.CachingAutotuner.run

    def run_in_large_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The interpreter takes the first configuration, and its time for every program and every lane.
        blocks = self.configs[0].kwargs
        if "XBLOCK" in blocks:
            blocks["XBLOCK"] = min(BLOCK, self.size_hints["x"])
        return run(self, *args, **kwargs)

    heuristics.CachingAutotuner.run = run_in_large_blocks  # type: ignore[method-assign]
    # Reductions by a function are interpreted element by element, those that NumPy knows are not.
    helpers.max2 = lambda values, dim: tl.max(values, dim)  # type: ignore[assignment]
    helpers.min2 = lambda values, dim: tl.min(values, dim)  # type: ignore[assignment]
    helpers.libdevice = Library()  # type: ignore[attr-defined]
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot


class OnCpu:
    """Every module that the compiler writes for fake CUDA tensors runs on the CPU tensors that `stand_in`
    named for them, in place; their source as `edit` changes it."""

    def __init__(self) -> None:
        self.edit: Callable[[str], str] = lambda source: source
        self._real: dict[int, torch.Tensor] = {}

    def stand_in(self, fake: torch.nn.Module, real: torch.nn.Module) -> None:
        """All tensors of `real` for those of `fake`."""
        for theirs, ours in zip(fake.modules(), real.modules(), strict=True):
            for members in (vars, lambda m: m._parameters, lambda m: m._buffers):
                tensors = {name: t for name, t in members(theirs).items() if isinstance(t, torch.Tensor)}
                self._real |= {id(tensor): members(ours)[name] for name, tensor in tensors.items()}

    def __enter__(self) -> OnCpu:
        from torch._inductor.codecache import PyCodeCache

        self._load = load = PyCodeCache.load_by_key_path

        def load_on_cpu(key: str, path: str, *args: Any, **kwargs: Any) -> ModuleType:
            source = Path(path).read_text()
            return self._module(source, path) if "def call(" in source else load(key, path, *args, **kwargs)

        PyCodeCache.load_by_key_path = load_on_cpu  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: Any) -> None:
        from torch._inductor.codecache import PyCodeCache

        PyCodeCache.load_by_key_path = self._load  # type: ignore[method-assign]

    def _module(self, source: str, path: str) -> ModuleType:
        source = source.replace("guards._empty_strided_cuda", "guards._empty_strided_cpu")
        source = source.replace("device='cuda'", "device='cpu'")
        module = _load(source, Path(path).with_suffix(".cpu.py"))
        versions = {source: module.call}

        def call(args: list[Any]) -> Any:
            real = [self._real[id(x)] if isinstance(x, torch.Tensor) else x for x in args]
            args.clear()
            edited = self.edit(source)
            if edited not in versions:
                versions[edited] = _load(edited, Path(path).with_suffix(f".{len(versions)}.py")).call
            with _disable_current_modes():
                return versions[edited](real)

        module.call = call  # type: ignore[attr-defined]
        return module


def _load(source: str, file: Path) -> ModuleType:
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(f"on_cpu_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
