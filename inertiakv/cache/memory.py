"""Available memory, and whether a request fits, checked before any work is done."""

from __future__ import annotations

import math
import os
from contextlib import suppress

import torch

from ..compiling.collectives import SINGLE_PROCESS, TensorParallel


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on a device, None where the system does not say."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    with suppress(OSError, StopIteration), open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def require(parts: dict[str, int], device: torch.device, tp: TensorParallel = SINGLE_PROCESS) -> None:
    """Raise MemoryError, listing `parts` (bytes), if they exceed what is available; with tensor parallelism
    on all ranks, if any of them has too little."""
    available, needed = available_bytes(device), sum(parts.values())
    if tp.size > 1:
        own = torch.tensor([math.inf if available is None else available], dtype=torch.float64, device=device)
        least = tp.gather(own).min().item()
        available = None if least == math.inf else int(least)
    if available is not None and needed > available:
        listing = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        raise MemoryError(
            f"needs {gib(needed)} on {device} ({listing}), but only {gib(available)} are available"
        )


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
