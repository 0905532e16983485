"""The machine and its software: what they are, how fast memory is read, how much was in use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inertiakv import __version__
from inertiakv.cache import memory

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "dot": lambda x: torch.dot(x, x),
}
"""Simple ways to read a buffer once. The fastest one counts."""
CPU_BUFFER, CUDA_BUFFER = 512 * 2**20, 4 * 2**30
REPEATS = 3


def describe(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    description: dict[str, Any] = {
        "device": str(device),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        description |= {"gpu": gpu.name, "gpu_memory_gb": round(gpu.total_memory / 1e9, 1)}
    return description


def versions(*others: str) -> dict[str, str]:
    """Versions of what takes part, and of `others`, as far as it is there."""
    found = {"python": platform.python_version(), "inertiakv": __version__, "torch": torch.__version__}
    for package in ("transformers", "triton", "kvpress", *others):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def revision() -> dict[str, Any] | None:
    """The checkout's commit, and whether files differ from it; None where git does not say."""

    def git(*command: str) -> str:
        folder = Path(__file__).resolve().parents[2]
        return subprocess.run(
            ["git", *command], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None


def measure_read(device: torch.device) -> float:
    """Bytes a second of the fastest simple read of a large buffer of written pages."""
    size = CUDA_BUFFER if device.type == "cuda" else CPU_BUFFER
    size = min(size, (memory.available_bytes(device) or size) // 2)
    buffer = torch.full((size // 4,), 0.5, device=device)
    seconds = [[_seconds(read, buffer) for _ in range(REPEATS + 1)][1:] for read in READS.values()]
    del buffer
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return size / min(map(statistics.median, seconds))


def measure_multiply(device: torch.device) -> float:
    """Multiplications and additions a second of the library's product of float32 matrices."""
    size = 1024
    matrix = torch.full((size, size), 0.5, device=device)
    return 2 * size**3 / min(_seconds(lambda x: x @ x, matrix) for _ in range(5 * REPEATS))


def _seconds(read: Callable[[Tensor], Tensor], buffer: Tensor) -> float:
    if buffer.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        read(buffer)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    read(buffer)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for a device to have done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Peak:
    """How far memory rises above what was in use before: `with Peak(device) as peak`, then `peak.bytes`.

    By CUDA's allocator, or by the resident memory of the process; None where the system does not say.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before: int | None = torch.cuda.memory_allocated(self.device)
        else:
            try:
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")  # the peak starts from now on
            except OSError:
                self._before = None
            else:
                self._before = _status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            now: int | None = torch.cuda.max_memory_allocated(self.device)
        else:
            now = _status("VmHWM")
        if now is not None and self._before is not None:
            self.bytes = max(0, now - self._before)


def _status(key: str) -> int | None:
    """A size from this process's status, in bytes."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(f"{key}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cpu_name() -> str:
    if sys.platform.startswith("linux"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
