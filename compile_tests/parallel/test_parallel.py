"""A model on 2 and on 4 processes is the model on one: logits, tokens, kept sets, utilities."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.parallel.cases import CASES, COMPILED, Case, run
from compile_tests.parallel.worker import GONE
from inertiakv.ranks import ALONE

ROOT = Path(__file__).resolve().parents[2]
SIZES = (2, 4)
ALL = CASES | COMPILED
Found = dict[str, dict[str, Any]]


def start(root: Path, size: int) -> list[subprocess.Popen[bytes]]:
    """Processes in the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "compile_tests.parallel.worker", str(root)]
    command += ["compiled"] if size == 2 else []
    here = os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    here |= {"OMP_NUM_THREADS": "1"}
    ranks = [here | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [subprocess.Popen(command, cwd=ROOT, env=environment) for environment in ranks]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all processes have left what they found."""
    root = tmp_path_factory.mktemp("parallel")
    for case in ALL.values():
        case.make(root)
    for size in SIZES:
        processes = start(root, size)
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert codes == [GONE if rank == 1 else 0 for rank in range(size)]
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> dict[int, list[Found]]:
    return {size: [torch.load(root / f"{size}-{rank}.pt") for rank in range(size)] for size in SIZES}


@pytest.fixture(scope="module")
def alone(root: Path) -> Found:
    return {name: run(case, root, ALONE) for name, case in CASES.items()}


def test_all_families_are_there() -> None:
    assert len({case.family for case in CASES.values()}) == 5


def possible(case: Case, size: int) -> bool:
    return True


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_equal(name: str, size: int, root: Path, found: dict[int, list[Found]], alone: Found) -> None:
    expected = alone[name]
    for rank, of_rank in enumerate(found[size]):
        actual = of_rank[name]
        torch.testing.assert_close(actual["logits"], expected["logits"])
        assert torch.equal(actual["logits"], found[size][0][name]["logits"])
        assert actual["tokens"] == expected["tokens"]
        assert actual["refreshes"] == expected["refreshes"]
        for kept, all_kept in zip(actual["kept"], expected["kept"], strict=True):
            assert kept == own_sets(all_kept, name, size, rank)
        for utilities, all_utilities in zip(actual["utilities"], expected["utilities"], strict=True):
            torch.testing.assert_close(utilities, own_sets(all_utilities, name, size, rank))


def own_sets(sets: list[Any], name: str, size: int, rank: int) -> list[Any]:
    """Those of a rank among the sets of a row: all of them, or where heads have sets those of its own."""
    case = CASES[name]
    if case.rule is None or case.rule.scope != "head":
        return sets
    own = case.kv_heads // size
    return [x for i, x in enumerate(sets) if i % case.kv_heads // own == rank]
