"""One process of several: runs all cases and writes down what it comes out with. Then rank 1 dies.

python -m compile_tests.parallel.worker FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from compile_tests.parallel.cases import BY_SIZE, RULES, run
from inertiakv.ranks import Ranks, check_agreement
from models.parallel import joined

GONE = 7
"""The exit code of a rank that dies."""


def main() -> None:
    torch.set_num_threads(1)
    root, start = Path(sys.argv[1]), 0.0
    try:
        with joined("cpu") as (ranks, _):
            found: dict[str, Any] = {
                name: run(case, root, ranks) for name, case in BY_SIZE[ranks.size].items()
            }
            found["disagreement"] = disagreement(ranks)
            torch.save(found, root / f"{ranks.size}-{ranks.rank}.pt")
            ranks.sum(torch.ones(1))  # all have written theirs
            if ranks.rank == 1:
                os._exit(GONE)
            start = time.monotonic()
            run(RULES["the paper's"], root, ranks)
    except ConnectionError as error:
        torch.save((time.monotonic() - start, str(error)), root / f"{ranks.size}-{ranks.rank}-lost.pt")


def disagreement(ranks: Ranks) -> str:
    """What is said where the last rank has chosen another token."""
    try:
        check_agreement(ranks, torch.tensor([5, int(ranks.rank == ranks.size - 1)]), ())
    except RuntimeError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    main()
