"""One process of several: runs all cases and writes down what it comes out with.

    python -m compile_tests.parallel.worker FOLDER [compiled]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from compile_tests.parallel.cases import CASES, COMPILED, run
from models.parallel import joined

GONE = 7
"""The exit code of a rank that dies."""


def main() -> None:
    root, compiled = Path(sys.argv[1]), "compiled" in sys.argv[2:]
    torch.set_num_threads(1)
    try:
        with joined("cpu") as (ranks, _):
            cases = CASES | COMPILED if compiled else CASES
            found = {name: run(case, root, ranks) for name, case in cases.items()}
            torch.save(found, root / f"{ranks.size}-{ranks.rank}.pt")
            ranks.sum(torch.ones(1))  # all have written
            if ranks.rank == 1:
                os._exit(GONE)
            start = time.monotonic()
            run(CASES["inertiakv"], root, ranks)
    except ConnectionError as error:
        (root / f"{ranks.size}-{ranks.rank}.error").write_text(f"{time.monotonic() - start}\n{error}")


if __name__ == "__main__":
    main()
