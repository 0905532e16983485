"""The page of what was reproduced says what its records say."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

from evals.records import read_records

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "reproduction"
LENGTHS = (1024, 2048)


def averages() -> dict[tuple[str, str], list[str]]:
    """Of each rule and share evicted the mean over tasks, at each length."""
    scores: dict[tuple[str, str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in FOLDER.glob("*/records.jsonl"):
        for record in read_records(path.parent):
            evicted = "-" if record.compression is None else f"{record.compression:.0%}".replace("%", " %")
            scores[record.policy, evicted, record.length][record.task].append(record.score)
    return {
        (policy, evicted): [
            f"{100 * mean(map(mean, scores[policy, evicted, length].values())):.1f}" for length in LENGTHS
        ]
        for policy, evicted, _ in scores
    }


def test_the_table() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    marked = re.search(r"<!-- measured -->(.*?)<!-- /measured -->", page, re.DOTALL)
    assert marked is not None
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \| (.*?) \|$", marked[1], re.MULTILINE)
    assert len(rows) >= 30
    measured = averages()
    for rule, evicted, *numbers in rows:
        assert numbers == measured[rule, evicted], rule
