"""How long the decode graphs take to compile: with an empty compile cache, and with one that knows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "bench.py"


def compile_seconds(options: Sequence[str]) -> dict[str, float]:
    """Seconds of `bench.py` with `options`, cold and warm, each in a process of its own: all that its first
    steps took longer than later ones, loading the compiler included. Raises ValueError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: _seconds(options, folder) for name in ("cold", "warm")}


def _seconds(options: Sequence[str], folder: str) -> float:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"}
    run = subprocess.run(
        [sys.executable, str(BENCH), *options, "--json"],
        env={**environment, "TORCHINDUCTOR_CACHE_DIR": folder},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise ValueError(f"measuring compile times failed: {(run.stderr.splitlines() or ['?'])[-1]}")
    return float(json.loads(run.stdout)["contenders"][0]["compile_seconds"])
