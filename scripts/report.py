"""Make a report of what scripts/eval.py has measured: tables, comparisons and pictures.

Folders of the same model, template and seed are put together, others side by side. The report is report.md,
with its pictures in plots/.

Examples:
  python scripts/report.py results/r1
  python scripts/report.py results/r1 results/r2 --out report

The exit code is 0, or 2 where the command line or a file is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv.evals.reporting import figures, page
from inertiakv.evals.reporting.suites import combine, read_run
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Option, parse
from inertiakv.scripts.cli.program import say


@dataclass(frozen=True)
class Arguments:
    folders: Annotated[tuple[Path, ...], Option(metavar="DIR", positional=True)]
    """Folders that scripts/eval.py has written."""
    out: Annotated[Path | None, Option(metavar="DIR", default="the first DIR")] = None
    """The folder that the report goes to."""


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: report(parse(Arguments, argv, __doc__)))


def report(args: Arguments) -> None:
    if not args.folders:
        raise ValueError("give at least one folder that scripts/eval.py has written")
    runs = [read_run(folder) for folder in dict.fromkeys(args.folders)]
    suites, notes = combine(runs)
    out = args.out or args.folders[0]
    out.mkdir(parents=True, exist_ok=True)
    made = page.page(runs, suites, notes, out / "plots")
    (out / "report.md").write_text(made, encoding="utf-8")
    for note in notes if figures.available() else [*notes, figures.MISSING]:
        say(f"note: {note}")
    print(f"{out / 'report.md'}")


if __name__ == "__main__":
    sys.exit(main())
