"""A model on 2 and on 4 processes is the model on one: logits, tokens, kept sets, utilities.

The processes run once, and each of them all cases (worker.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.parallel.cases import BY_SIZE, COMPILED, FAMILIES, LENGTHS, RULES, Case, run
from compile_tests.parallel.worker import PATIENCE
from inertiakv.compiling.collectives import SINGLE_PROCESS
from inertiakv.models.checkpoint import SINGLE, read_header

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SIZES = (2, 4)
EAGER = FAMILIES | RULES
RUN = [(name, size) for size in SIZES for name in BY_SIZE[size] if name in EAGER]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints, in which all processes have left what they found."""
    root = tmp_path_factory.mktemp("parallel")
    for case in EAGER.values():
        case.make(root)
    command = [sys.executable, "-m", "compile_tests.parallel.worker", str(root)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> dict[int, list[Found]]:
    """For each number of ranks, what each of them found."""
    return {size: [torch.load(root / f"{size}-{rank}.pt") for rank in range(size)] for size in SIZES}


@pytest.fixture(scope="module")
def alone(root: Path) -> Found:
    """What one process finds. What is compiled by several it runs as it is."""
    as_they_are = {name: replace(case, compile=False) for name, case in COMPILED.items()}
    return {name: run(case, root, SINGLE_PROCESS) for name, case in (EAGER | as_they_are).items()}


@pytest.mark.parametrize("name,size", RUN)
def test_ranks_equal_one_process(name: str, size: int, found: dict[int, list[Found]], alone: Found) -> None:
    case, expected = EAGER[name], alone[name]
    for rank, of_rank in enumerate(found[size]):
        actual = of_rank[name]
        torch.testing.assert_close(actual["logits"], expected["logits"])
        assert torch.equal(actual["logits"], found[size][0][name]["logits"])
        assert actual["tokens"] == expected["tokens"]
        for row in range(len(LENGTHS)):
            own = own_sets(case, len(expected["kept"][row]), size, rank)
            assert actual["kept"][row] == [expected["kept"][row][i] for i in own]
            utilities = [expected["utilities"][row][i] for i in own]
            torch.testing.assert_close(actual["utilities"][row], utilities)
        assert actual["cache_bytes"] * min(size, case.kv_heads) == expected["cache_bytes"]


def own_sets(case: Case, number: int, size: int, rank: int) -> list[int]:
    """A rank's among the retention sets of a row: all of them, or where heads have sets those of its own."""
    if case.rule is None or case.rule.scope != "head":
        return list(range(number))
    return [i for i in range(number) if i % case.kv_heads * size // case.kv_heads == rank]


def test_cases_are_of_all_families_and_evict() -> None:
    assert len({case.family for case in EAGER.values()}) == 5
    assert all(case.rule is None or (case.rule.budget or 0) < min(LENGTHS) for case in EAGER.values())


def test_compiled(found: dict[int, list[Found]], alone: Found) -> None:
    for of_rank in found[2]:
        actual, expected = of_rank["compiled"], alone["compiled"]
        assert actual["tokens"] == expected["tokens"]
        assert actual["kept"] == expected["kept"]
        assert actual["graphs"] == (1, 0, 0)


@pytest.mark.parametrize("name,size", RUN)
def test_bytes_of_a_rank(name: str, size: int, root: Path, found: dict[int, list[Found]]) -> None:
    """Norms and routers are whole, KV heads as many as a rank has, of all else it has its part."""
    case, expected = EAGER[name], 0
    for tensor, stored in read_header(case.folder(root) / SINGLE).items():
        if "norm" in tensor or "mlp.gate." in tensor:
            parts = 1
        elif "k_proj" in tensor or "v_proj" in tensor:
            parts = min(size, case.kv_heads)
        else:
            parts = size
        expected += stored.num_bytes // parts
    assert {of_rank[name]["num_bytes"] for of_rank in found[size]} == {expected}


@pytest.mark.parametrize("size", SIZES)
def test_disagreement_is_seen_by_all(size: int, found: dict[int, list[Found]]) -> None:
    message = f"ranks disagree: tokens of rank {size - 1} differ from those of rank 0"
    assert [of_rank["disagreement"] for of_rank in found[size]] == [message] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_dies_ends_the_others(size: int, root: Path) -> None:
    for rank in set(range(size)) - {1}:
        seconds, message = torch.load(root / f"{size}-{rank}-lost.pt")
        assert message.startswith(f"rank {rank} has lost another one of {size}")
        assert seconds < PATIENCE / 10


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_no_thread_outlives_the_group(root: Path) -> None:
    """One that is there when the interpreter ends aborts the process."""
    for rank in range(2):
        within, afterwards = torch.load(root / f"ended-{rank}.pt")
        assert within
        assert afterwards == []
