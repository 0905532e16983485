"""Make benchmarks/README.md from the results files beside it.

Example:
  python scripts/bench.py --out benchmarks/laptop.json && python scripts/bench_table.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, installed or not

from inertiakv.evals.reporting.table import markdown_table
from inertiakv.scripts.benchmarking import report, results
from inertiakv.scripts.benchmarking.rivals import KVPRESS_PACKAGES
from inertiakv.scripts.cli import program
from inertiakv.scripts.planning import check

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"

INTRODUCTION = f"""\
# Benchmarks

Made by `python scripts/bench_table.py` from the results files in this folder, which `scripts/bench.py --out`
writes. Change neither by hand.

* **ms/step**: wall-clock milliseconds of a decode step, bookkeeping on the host included: the median, and the
  10th and 90th percentiles. Contenders take turns in one process, a block of steps each. Where a policy
  scores at some steps only, a sample is the mean of a whole period, and *scoring/other* gives both kinds.
* **of ...**: the time as a part of the reference's; smaller is faster. The median of what the rounds say, in
  each of which both were measured within seconds: not the ratio of the medians beside it.
* **of the limit**: the least time that reading takes (weights once, kept K and V once, at the bandwidth that
  was measured between the contenders' turns) as a part of the time taken; 1.00 cannot be beaten.
* **a step of, the first step of**: profiles, measured after the table above them, so that their parts do not
  add up to its times.
* **of batch 1**: token/s as a multiple of those of the same contender at batch 1.
* **kept**: tokens in the cache, of all rows together; **cache MB**: K and V as allocated.
* **first token**: prefill included, and **peak MB** how far memory rose meanwhile. Prefill is the same for
  all of a kind: the first one does it, the others' caches are filled with random K and V, as all are with
  `--skip-prefill`. **first step**: scores the whole prompt and evicts it down to budget.

`transformers` is its `generate` with a dynamic cache and SDPA, `transformers-static` the same with a static
cache, compiled. `kvpress` and `kvpress4` are kvpress with TOVA as a decoding press, at every or at every
fourth step. It needs an older transformers, so an environment of its own, and then two commands:

```bash
python -m venv .kvpress && .kvpress/bin/pip install {KVPRESS_PACKAGES}
.kvpress/bin/python scripts/bench.py --policies none --against kvpress,kvpress4 --out kvpress.json
python scripts/bench.py --merge kvpress.json
```
"""

PREDICTIONS = """\
## What scripts/plan.py predicts

Each step above of a policy, and what [`scripts/plan.py`](../scripts/plan.py) makes of it: the bytes of the
weights, and of K and V as allocated, each read with a share of the bandwidth, and from some batch on the time
of arithmetic instead of the weights'. The shares are fitted to all these steps. *Held out* is the error where
they are fitted to all but those of the row's file, dtype, context and batch; "-" where nothing else tells
them, as with the only batch, or the only context of a dtype.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench_table.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="with results files")
    folder = parser.parse_args(argv).folder
    return program.run(lambda: write(folder))


def write(folder: Path) -> None:
    page = make_page(folder)
    (folder / "README.md").write_text(page, encoding="utf-8")


def make_page(folder: Path) -> str:
    """Raises ValueError without results, or for a file that is none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"no results files in {folder}")
    sections = [section(file.name, results.read(file)) for file in files]
    return "\n".join([INTRODUCTION, *sections, *predictions(files)])


def section(name: str, result: dict[str, Any]) -> str:
    """One results file."""
    about, *compiling = report.about(result)
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    facts = [about, versions, *compiling, f"`{result['command']}`"]
    lines = [f"## {name}", "", *(f"* {fact}" for fact in facts), ""]
    for title, rows in report.cases(result):
        lines += [f"**{title}**", "", markdown_table(report.table_lines(rows)), ""]
    for title, profile in report.profiles(result):
        ms = {part.replace("_", " "): f"{value:.2f}" for part, value in profile["ms"].items()}
        lines += [f"{title}, in ms ({profile['method']}):", "", markdown_table(report.table_lines([ms])), ""]
    lines += [f"* Left out: {report.skipped_line(skipped)}" for skipped in result.get("skipped", ())]
    return "\n".join(lines).rstrip() + "\n"


def predictions(files: Sequence[Path]) -> list[str]:
    """What is predicted for the steps in the files whose model is a known shape."""
    rows = check.predict(check.measured(files))
    if not rows:
        return []
    lines = "\n".join(f"* {line}" for line in check.summary(rows))
    return [PREDICTIONS, f"{markdown_table(check.table(rows))}\n", f"{lines}\n" if lines else ""]


if __name__ == "__main__":
    sys.exit(main())
