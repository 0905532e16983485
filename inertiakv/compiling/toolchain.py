"""Whether this machine can compile."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch


def missing_toolchain(device: torch.device) -> str | None:
    """What a machine lacks for compiling for a device, and how to get it; None where it lacks nothing."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "there is no Triton (pip install triton)"
        found = any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
        return None if found else "there is no C compiler (apt install gcc, say)"
    compiler = os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler} (apt install g++, say)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "there are no headers of Python (apt install python3-dev, say)"
    return None
