"""Runs all cases on 2 and on 4 processes, forked from this one so that they need not import all anew; each
writes down what it comes out with. Then rank 1 dies.

    python -m compile_tests.parallel.worker FOLDER
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from compile_tests.parallel.cases import BY_SIZE, RULES, run
from inertiakv.ranks import Ranks, check_agreement
from models.parallel import joined

PATIENCE = 300
GONE = 7
"""The exit code of a rank that dies."""


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    for size in BY_SIZE:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=work, args=(root, place, size, rank)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(PATIENCE)
            rank.kill()
        codes = [rank.exitcode for rank in ranks]
        assert codes == [GONE if rank == 1 else 0 for rank in range(size)], codes


def work(root: Path, place: dict[str, str], size: int, rank: int) -> None:
    """What a rank does, in the environment that torchrun would give it."""
    os.environ |= place | {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    start = 0.0
    try:
        with joined("cpu") as (ranks, _):
            found: dict[str, Any] = {name: run(case, root, ranks) for name, case in BY_SIZE[size].items()}
            found["disagreement"] = disagreement(ranks)
            torch.save(found, root / f"{size}-{rank}.pt")
            ranks.sum(torch.ones(1))  # all have written theirs
            if rank == 1:
                os._exit(GONE)
            start = time.monotonic()
            run(RULES["the paper's"], root, ranks)
    except ConnectionError as error:
        torch.save((time.monotonic() - start, str(error)), root / f"{size}-{rank}-lost.pt")


def disagreement(ranks: Ranks) -> str:
    """What is said where the last rank has chosen another token."""
    try:
        check_agreement(ranks, torch.tensor([5, int(ranks.rank == ranks.size - 1)]), ())
    except RuntimeError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    main()
