"""What scripts/eval.py refuses, and its help."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile_tests.scripts.eval.folders import MADE, ROOT, Cli
from inertiakv.cache import memory
from inertiakv.evals import registry


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    "argv, message",
    [
        ("", "required"),
        ("--tasks best", "unknown benchmark 'best'; choose from made, rows"),
        ("--tasks made:best", "unknown task 'made:best'; choose from made:short, made:long"),
        ("--tasks rows,", "unknown benchmark ''"),
        ("--tasks made", "made:short makes prompts of any length: give --lengths"),
        ("--tasks rows --lengths 100", "--lengths has no effect on rows"),
        ("--tasks rows --essays hub", "--essays has no effect on rows"),
        (f"{MADE} --data .", "--data has no effect on made:short"),
        ("--tasks rows --data nowhere", "--data nowhere is no folder"),
        (f"{MADE} --lengths 100,x", "argument --lengths: expected N,..., got 'x'"),
        (f"{MADE} --lengths 0", "argument --lengths: must be at least 1, got 0"),
        (f"{MADE} --samples 0", "argument --samples: must be at least 1, got 0"),
        (f"{MADE} --batch 0", "argument --batch: must be at least 1, got 0"),
        (f"{MADE} --policies best", "unknown policy 'best'"),
        (f"{MADE} --policies lazy4:pool=4", "lazy4:pool=4: pool must be an odd number of positions, got 4"),
        (f"{MADE} --compression 0.9,most", "argument --compression: expected X,..., got 'most'"),
        (f"{MADE} --compression 1.5", "inertiakv: compression must be a number in [0, 1), got 1.5"),
        (f"{MADE} --compression 0.5 --budget 9", "give compressions or budgets, not both"),
        (f"{MADE} --budget 0", "inertiakv: budget must be a whole number of at least 1, got 0"),
        (f"{MADE} --budget 0.5", "argument --budget: expected N,..., got '0.5'"),
        (f"{MADE} --policies snapkv", "snapkv@0.9, --lengths 100: recent (32) protect more tokens than"),
        (f"{MADE} --policies snapkv --budget 16", "snapkv: recent (32) protect more tokens than the budget"),
        (f"{MADE} --policies full --budget 16", "have no effect on 'full'"),
        (f"{MADE} --template plain", "plain"),
        (f"{MADE} --device abacus", "device 'abacus' cannot be used"),
    ],
)
def test_wrong_command_lines(argv: str, message: str, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli(*argv.split(), "--out", out)
    assert message in result.error
    assert result.err.count("\n") == 1
    assert not out.exists()


@pytest.mark.usefixtures("unloaded")
def test_places_for_results_that_cannot_be(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cli(*MADE.split(), "--out", tmp_path / "file").error.endswith("file is no folder")
    for name in ("run_meta.json", "records.jsonl", "records-3.jsonl"):  # of another number of processes
        out = tmp_path / name
        out.mkdir()
        (out / "run_meta.json").write_text("")
        (out / name).write_text("")
        assert "has results of a run: go on with --resume" in cli(*MADE.split(), "--out", out).error
        (out / "run_meta.json").unlink()
        for resume in [[], ["--resume"]] if name != "run_meta.json" else []:
            error = cli(*MADE.split(), "--out", out, *resume).error
            assert error == f"{out} has records but no run_meta.json, which says of what: give another --out"


def test_what_only_model_and_prompts_show(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    argv = ("--tasks", "made:long,rows", "--out", out, "--lengths")
    assert "--lengths 600 is more than the model's 512 positions" in cli(*argv, "100,600").error
    assert "made:long makes as many samples as are asked for: give --samples" in cli(*argv, 100).error
    error = cli(*argv, 512, "--samples", 2).error
    assert "made:long at 512 tokens, sample 0: 506 tokens and 9 new ones exceed the model's 512" in error
    error = cli(*argv, 130, "--samples", 2, "--policies", "inertiakv:sinks=12").error
    assert "rows, sample 1: inertiakv:sinks=12@0.9: sinks (12) protect more tokens than the budget" in error
    error = cli(*argv, 130, "--samples", 1, "--policies", "inertiakv:layers=9").error
    assert error.startswith("inertiakv:layers=9@0.9: ")
    (plain := tmp_path / "plain").mkdir()
    shutil.copytree(folder, plain, dirs_exist_ok=True)
    (plain / "chat_template.jinja").unlink()
    assert "give --template none" in cli(*argv, 130, "--samples", 1, model=plain).error
    assert "no model 'nowhere'" in cli(*argv, 130, "--samples", 1, model="nowhere").error
    assert not out.exists()
    monkeypatch.setattr(memory, "available_bytes", lambda _: 1)
    error = cli(*argv, 130, "--samples", 1).error
    assert re.search(r"^the full cache, 1 prompts of at most \d+ tokens: needs .*; a smaller --batch", error)


def test_a_package_that_is_missing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(names: Any, setting: Any) -> Any:
        raise ImportError("rouge is missing: pip install 'inertiakv[eval]'")

    monkeypatch.setattr(registry, "make_tasks", missing)
    assert (
        cli(*MADE.split(), "--out", tmp_path / "out").error
        == "rouge is missing: pip install 'inertiakv[eval]'"
    )


# As a program
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_help(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "scripts" / "eval.py"), "--help"]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    for option in (
        "--tasks",
        "--lengths",
        "--policies",
        "--compression",
        "--resume",
        "--template",
        "--essays",
    ):
        assert option in result.stdout
