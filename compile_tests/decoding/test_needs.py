"""What is promised to fit: for every policy at least what is taken, and at most 15 percent more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from inertiakv import POLICIES

HERE = Path(__file__).parent
COMPILER = which("cc") or which("gcc")
needs_heap = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="needs a C compiler and glibc"
)
MOST = 1.15

# One policy for each way of scoring and of keeping sets; the rest of them share its formulas.
KINDS = ("full", "inertiakv", "h2o", "snapkv", "adakv_ea", "kvzip", "keydiff")


@pytest.fixture(scope="module")
def heap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("heap") / "heap.so"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-o", library, HERE / "heap.c"], check=True)
    return library


def measured(heap: Path, cases: list[tuple[str, int, int, str]]) -> list[list[Any]]:
    """[policy, rows, tokens that each row is shorter than the one before, dtype, promised, taken]."""
    command = [sys.executable, "-W", "ignore", str(HERE / "peaks.py"), json.dumps(cases)]
    environment = {**os.environ, "LD_PRELOAD": str(heap), "PYTHONPATH": str(HERE.parents[1])}
    out = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert out.returncode == 0, out.stderr
    return [json.loads(line) for line in out.stdout.splitlines()]


def assert_kept(rows: list[list[Any]]) -> None:
    table = [(*row, round(row[-2] / row[-1], 3)) for row in rows]
    print(*table, sep="\n")
    assert not [row for row in table if not 1 <= row[-1] <= MOST]


@needs_heap
def test_promises_of_each_kind_of_policy(heap: Path) -> None:
    assert_kept(measured(heap, [(name, 1, 0, "float32") for name in KINDS]))


@needs_heap
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_promises_of_every_policy(heap: Path, rows: int) -> None:
    assert_kept(measured(heap, [(name, rows, 0, "float32") for name in POLICIES]))


@needs_heap
@pytest.mark.slow
def test_promises_in_bfloat16(heap: Path) -> None:
    assert_kept(measured(heap, [(name, 4, 0, "bfloat16") for name in KINDS]))


@needs_heap
@pytest.mark.slow
def test_promises_of_uneven_rows(heap: Path) -> None:
    assert_kept(measured(heap, [(name, 4, 37, "float32") for name in KINDS]))
