"""`scripts/eval.py` with the benchmarks of these tests, for torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compile_tests.evals.fake_benchmarks import BENCHMARKS, ESSAYS
from inertiakv.evals import registry
from inertiakv.scripts import eval as script

if __name__ == "__main__":
    registry.BENCHMARKS = BENCHMARKS
    script.load_essays = lambda source: ESSAYS
    sys.exit(script.main())
