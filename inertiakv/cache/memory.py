"""Available memory, and whether a request fits, checked before any work is done."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from ..compiling.collectives import SINGLE_PROCESS, TensorParallel


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on a device, None where the system does not say."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    # A container may have less than the machine.
    free = [size for size in (_machine_bytes(), _group_bytes()) if size is not None]
    return min(free, default=None)


def _machine_bytes() -> int | None:
    with suppress(OSError, StopIteration), open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _group_bytes(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the least of the limits on this process's control groups, and on those that they are in, leaves;
    None where there is none."""
    least = None
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, names = (root / "memory", _NAMES_1) if controllers else (root, _NAMES_2)
            inner = top / path.lstrip("/")
            # From within a container the path may be one that only its host sees: then the top is its group.
            for group in [inner, *inner.parents]:
                left = _left_in(group, *names)
                least = left if least is None or (left is not None and left < least) else least
                if group == top:
                    break
    return least


_NAMES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NAMES_2 = ("memory.max", "memory.current", "inactive_file")
"""Of control groups of version 1 and 2: limit, use, and what of the use are files that can be given up."""


def _left_in(group: Path, limit: str, usage: str, inactive: str) -> int | None:
    try:
        most = int((group / limit).read_text())
        used = int((group / usage).read_text())
    except (OSError, ValueError):  # "max": no limit
        return None
    given_up = 0
    with suppress(OSError, ValueError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        given_up = int(stat.get(inactive, 0))
    return max(0, most - max(0, used - given_up))


MATTERS = 16 << 20
"""Bytes of a cache from which on it is worth a few milliseconds to give them back to the system."""


def give_back(device: torch.device, size: int) -> None:
    """Give memory back to the system once `size` bytes have been freed, where that matters: glibc keeps what
    lies between what is in use. Other allocators see to it themselves."""
    if device.type == "cpu" and size >= MATTERS and (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError, AttributeError):
        return ctypes.CDLL(None).malloc_trim
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
