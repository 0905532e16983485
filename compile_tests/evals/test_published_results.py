"""The pages on results that are kept say what their records say."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from inertiakv.evals.records import read_records

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TABLE = re.compile(
    r"<!-- measured( \d+)? -->\n\| rule \| evicted \| (.*?) \|\n\|[^\n]*\n(.*?)<!-- /measured -->", re.S
)


def means(folder: Path) -> dict[tuple[str, str], dict[tuple[str, int], float]]:
    """Percent: of each rule and share evicted, for each task and length."""
    scores: dict[tuple[str, str], dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for part in sorted(path.parent for path in folder.glob("*/records.jsonl")):
        for record in read_records(part):
            evicted = "-" if record.compression is None else f"{100 * record.compression:g} %"
            task = record.task.removeprefix("ruler:").removeprefix("niah_")
            scores[record.policy, evicted][task, record.length or 0].append(100 * record.score)
    return {rule: {key: mean(values) for key, values in of_rule.items()} for rule, of_rule in scores.items()}


@pytest.mark.parametrize("name", ["reproduction", "rehearsal"])
def test_tables(name: str) -> None:
    page = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    measured, checked = means(FOLDER / name), 0
    for length, head, body in TABLE.findall(page):
        columns = head.split(" | ")
        for line in body.splitlines():
            rule, evicted, *numbers = line.strip("| ").split(" | ")
            of_rule = measured[rule.strip("`"), evicted]
            for column, number in zip(columns, numbers, strict=True):
                if column in ("1k", "2k"):  # over tasks
                    at = {"1k": 1024, "2k": 2048}[column]
                    value = mean(score for (_, tokens), score in of_rule.items() if tokens == at)
                elif column == "mean":
                    value = mean(score for (_, tokens), score in of_rule.items() if tokens == int(length))
                else:
                    value = of_rule[column, int(length)]
                assert number == f"{value:.1f}", (rule, evicted, column)
                checked += 1
    assert checked > 50
