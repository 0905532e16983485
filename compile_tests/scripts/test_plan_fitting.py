"""What `scripts/plan.py` says would fit: each change is enough, and the least one of its kind."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inertiakv import policy
from inertiakv.models import parse_config
from inertiakv.scripts import plan
from inertiakv.scripts.benchmarking.shapes import SHAPES
from inertiakv.scripts.planning import fitting

ROOT = Path(__file__).resolve().parents[2]


def asked_for(name: str = "llama-3.1-8b", rule: str = "inertiakv", **changes: Any) -> fitting.Request:
    plain = fitting.Request(
        parse_config(SHAPES[name]), torch.bfloat16, None, 1, 64_000, 128, 1, policy(rule), on_cpu=False
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("rule", ["full", "inertiakv"])
@pytest.mark.parametrize("gb, batch", [(21.6, 1), (14.4, 1), (43.2, 8), (30, 2), (60, 16), (9, 1)])
def test_every_change_is_enough_and_the_least_one(rule: str, gb: float, batch: int) -> None:
    asked, available = asked_for(rule=rule, batch=batch), 1e9 * gb
    found = fitting.describe(asked, available)
    assert found["missing_bytes"] == asked.size - available > 0
    assert sum(found["parts"].values()) == found["bytes"] == asked.size
    for change in found["changes"]:
        options = {"chunk" if name == "prefill_chunk" else name: v for name, v in change["options"].items()}
        request = replace(asked, **options)
        assert request.size == change["bytes"] <= available
        one_more = {"context": 1, "batch": 1, "chunk": options.get("chunk", 0)}
        for name in one_more.keys() & options.keys():
            assert replace(request, **{name: options[name] + one_more[name]}).size > available
        if "ranks" in options:
            assert replace(request, ranks=options["ranks"] // 2).size > available
    options = [tuple(change["options"]) for change in found["changes"]]
    assert len(set(options)) == len(options)
    enough = replace(asked, quantize="int8").fits(available)
    assert (("quantize",) in options) == enough
    assert not enough or not any(len(names) > 1 for names in options)


def test_an_8b_model_on_a_card_of_24_gb() -> None:
    found = fitting.describe(asked_for(), 21.6e9)
    assert [list(change["options"]) for change in found["changes"]] == [["context"], ["quantize"], ["ranks"]]
    # Where even the weights are too much, int8 ones may leave room for a shorter prompt.
    changes = fitting.describe(asked_for(), 14.4e9)["changes"]
    assert [list(change["options"]) for change in changes] == [["ranks"], ["quantize", "context"]]


def test_smaller_chunks_where_the_workspace_is_too_much() -> None:
    asked = asked_for(context=2048)
    (chunk,) = (
        change["options"]["prefill_chunk"]
        for change in fitting.describe(asked, asked.size - asked.footprint.workspace / 3)["changes"]
        if "prefill_chunk" in change["options"]
    )
    assert chunk == 1024


def test_changes_that_cannot_be_are_left_out() -> None:
    moe = asked_for("qwen3-30b-a3b", context=30_000)
    names = [name for change in fitting.describe(moe, 21.6e9)["changes"] for name in change["options"]]
    assert names == ["ranks"]
    assert not fitting.describe(asked_for(rule="adakv"), 1e9)["changes"]
    alone = fitting.describe(asked_for(rule="adakv"), 21.6e9)["changes"]
    assert [list(change["options"]) for change in alone] == [["context"], ["quantize"]]


@pytest.mark.parametrize(
    "gb, batch, words",
    [
        (21.6, 1, ["does not fit", "GB are missing. What would fit: --context "]),
        (14.4, 1, ["are missing; the weights alone are too much. What would fit: --ranks 2 ("]),
        (35.0, 8, ["8 rows of 64,000 tokens under inertiakv: fits only where prompts are read one by one"]),
        (1.0, 1, ["What would fit: only a larger device."]),
        (99.0, 1, ["It fits: 1 row of 64,000 tokens take", "GB under inertiakv, of 99.00 GB; "]),
    ],
)
def test_what_would_fit_in_words(gb: float, batch: int, words: list[str]) -> None:
    asked = asked_for(batch=batch)
    place = {"policy": "inertiakv", "ranks": 1, "context": asked.context}
    (said,) = fitting.sentences({"fitting": [place | fitting.describe(asked, 1e9 * gb)]})
    assert all(part in said for part in words), said


def test_the_example_of_the_docs_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Where a formula has changed, put there what the command prints."""
    section = (ROOT / "docs" / "planning.md").read_text().split("## When it does not fit")[1]
    (command,) = re.findall(r"^inertiakv plan (.*)$", section, re.MULTILINE)
    shown = section.split("```text\n")[1].split("```")[0]
    assert plan.main(shlex.split(command)) == 0
    assert capsys.readouterr().out.startswith(shown)
    assert {"--context", "--quantize", "--ranks"} <= set(re.findall(r"--[a-z]+", shown))
