"""Runs all cases on 2 and on 4 processes, forked from this one so that they need not import all anew; each
writes down what it comes out with. Then rank 1 dies. Two more end as they should, and say what is left.

    python -m compile_tests.parallel.worker FOLDER
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compile_tests.parallel.cases import BY_SIZE, RULES, run
from inertiakv.compiling.collectives import TensorParallel
from inertiakv.decoding.tensor_parallel import check_agreement
from inertiakv.models.parallel import init_tensor_parallel

PATIENCE = 300
GONE = 7
"""The exit code of a rank that dies."""


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    assert start(end, root, 2) == [0, 0]
    for size in BY_SIZE:
        codes = start(work, root, size)
        assert codes == [GONE if rank == 1 else 0 for rank in range(size)], codes


def start(what: Callable[..., None], root: Path, size: int) -> list[int | None]:
    """Let so many processes do something together; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    fork = multiprocessing.get_context("fork")
    tp = [fork.Process(target=what, args=(root, place, size, rank)) for rank in range(size)]
    for rank in tp:
        rank.start()
    for rank in tp:
        rank.join(PATIENCE)
        rank.kill()
    return [rank.exitcode for rank in tp]


def join(place: dict[str, str], size: int, rank: int) -> Any:
    """Join the others, in the environment that torchrun would give."""
    os.environ |= place | {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    return init_tensor_parallel("cpu")


def end(root: Path, place: dict[str, str], size: int, rank: int) -> None:
    """Join and leave, and write down the group's threads, then and afterwards. Between the two comes what
    compiling imports, too."""
    assert "torch.distributed.nn" not in sys.modules
    with join(place, size, rank) as (tp, _):
        importlib.import_module("torch.distributed.nn")
        tp.sum(torch.ones(1))
        within = threads()
    torch.save((within, threads()), root / f"ended-{rank}.pt")


def threads() -> list[str]:
    """Names of this process's threads that are a group's."""
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith(("gloo", "pt_gloo"))]


def work(root: Path, place: dict[str, str], size: int, rank: int) -> None:
    """What a rank does."""
    begin = 0.0
    try:
        with join(place, size, rank) as (tp, _):
            found: dict[str, Any] = {name: run(case, root, tp) for name, case in BY_SIZE[size].items()}
            found["disagreement"] = disagreement(tp)
            torch.save(found, root / f"{size}-{rank}.pt")
            tp.sum(torch.ones(1))  # all have written theirs
            if rank == 1:
                os._exit(GONE)
            begin = time.monotonic()
            run(RULES["the paper's"], root, tp)
    except ConnectionError as error:
        torch.save((time.monotonic() - begin, str(error)), root / f"{size}-{rank}-lost.pt")


def disagreement(tp: TensorParallel) -> str:
    """What is said where the last rank has chosen another token."""
    try:
        check_agreement(tp, torch.tensor([5, int(tp.rank == tp.size - 1)]), ())
    except RuntimeError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    main()
