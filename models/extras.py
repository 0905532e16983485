"""Packages that not everybody needs, and how to get them."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OF_GGUF = ("gguf", "accelerate")


def install(extra: str) -> str:
    """The command that installs an extra: of the installed package, or of this checkout."""
    try:
        distribution("inertiakv")
        where = "inertiakv"
    except PackageNotFoundError:
        where = str(Path(__file__).resolve().parents[1])
    return f"pip install '{where}[{extra}]'"


def missing(*packages: str) -> str:
    """Those that are not installed, as a text says it."""
    return " and ".join(name for name in packages if importlib.util.find_spec(name) is None)
