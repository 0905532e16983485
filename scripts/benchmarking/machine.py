"""The machine and its software: what they are, how fast memory is read, and how much of it is in use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
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
        "cpu": _proc("cpuinfo", "model name") or platform.processor() or platform.machine(),
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
    """Versions of the software that takes part, and of those `others` that are installed."""
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
    """The checkout's commit, and whether tracked files differ from it. None without git."""
    commands = ("rev-parse HEAD", "status --porcelain --untracked-files=no")
    options: dict[str, Any] = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL, "text": True}
    try:
        commit, changes = (subprocess.check_output(["git", *c.split()], **options) for c in commands)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.strip(), "dirty": bool(changes)}


def measure_read(device: torch.device) -> float:
    """Memory bandwidth in bytes/s: of the fastest simple read of a large buffer."""
    size = CUDA_BUFFER if device.type == "cuda" else CPU_BUFFER
    size = min(size, (memory.available_bytes(device) or size) // 2)
    buffer = torch.full((size // 4,), 0.5, device=device)
    seconds = [[_seconds(read, buffer) for _ in range(REPEATS + 1)][1:] for read in READS.values()]
    del buffer
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return size / min(map(statistics.median, seconds))


def _seconds(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    if x.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function(x)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    function(x)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_peak(device: torch.device) -> int | None:
    """Start to watch the peak of memory in use, by CUDA's allocator or as resident memory of the process.
    Returns the bytes in use now for `peak_since`, None if the system does not say."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return None
    return _status("VmRSS")


def peak_since(before: int | None, device: torch.device) -> int | None:
    """How far memory in use has risen above `before`, in bytes."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def _status(key: str) -> int | None:
    """A size in this process's status, in bytes."""
    value = _proc("self/status", key)
    return None if value is None else 1024 * int(value.split()[0])


def _proc(file: str, key: str) -> str | None:
    """The first value of a key in a file of /proc, None if there is none."""
    try:
        with open(f"/proc/{file}") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
    except OSError:
        return None
