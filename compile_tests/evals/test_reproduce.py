"""The paper's comparisons in one command: parts that can be run, and a small run through all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compile_tests.tiny_chat import tiny_chat
from inertiakv import POLICIES
from inertiakv.evals import registry
from inertiakv.evals.rules import choose_rules
from inertiakv.scripts import eval as evaluation
from inertiakv.scripts import reproduce
from inertiakv.scripts.cli import arguments


@pytest.mark.parametrize("scale", [reproduce.small, reproduce.full])
def test_parts_can_be_run(scale: Callable[[], dict[str, reproduce.Part]], tmp_path: Path) -> None:
    asked = set()
    for part in scale().values():
        argv = reproduce.command(reproduce.Arguments(), tmp_path / "out", part)
        args = arguments.parse(evaluation.Arguments, argv, "")
        asked |= {rule.policy for rule in choose_rules(args.policies, args.compression[:1], [])}
        evaluation.check_tasks(args, registry.expand(args.tasks))
    assert asked >= set(POLICIES)


@pytest.mark.slow
def test_a_small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_chat(tmp_path / "model")
    parts = {
        "one": reproduce.Part(("niah",), ("full", "tova"), (900,), 1),
        "two": reproduce.Part(("niah",), ("inertiakv",), (900,), 1, (0.5, 0.75)),
    }
    monkeypatch.setattr(reproduce, "small", lambda: parts)
    command = reproduce.command
    monkeypatch.setattr(reproduce, "command", lambda *args: [*command(*args), "--no-compile"])
    out = tmp_path / "out"
    argv = ["--model", str(model), "--out", str(out), "--batch", "2"]
    assert reproduce.main(argv) == 0, capsys.readouterr().err
    records = [json.loads(line) for name in parts for line in (out / name / "records.jsonl").open()]
    assert len(records) == 2 + 2
    assert "tova" in (out / "report.md").read_text(encoding="utf-8")
    capsys.readouterr()
    assert reproduce.main(argv) == 0, "a second call has nothing left to ask"
    assert sum(1 for name in parts for _ in (out / name / "records.jsonl").open()) == len(records)


def test_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "--data has no effect with --scale small" in capsys.readouterr().err
    assert reproduce.main(["--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "the part policies has failed" in capsys.readouterr().err
