"""`scripts/gpu_check.sh`, rehearsed without a GPU: what it runs, and what it makes of parts that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inertiakv.scripts.benchmarking import combine, results

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = {
    "PYTHON": sys.executable,
    "DEVICE": "cpu",
    "SHAPE": "tiny",
    "CONTEXTS": "100",
    "BATCHES": "1",
    "BENCH_ARGS": "--no-compile --dtype float32 --steps 4 --blocks 1 --read-gb-per-s 10",
}


@pytest.mark.slow
def test_every_part_leaves_its_mark_and_a_failing_one_stops_none(tmp_path: Path) -> None:
    """Compile times cannot be had uncompiled, so that this part fails."""
    file = tmp_path / "result.json"
    run = subprocess.run(
        ["bash", "scripts/gpu_check.sh", str(file)],
        cwd=ROOT,
        env={**os.environ, **REHEARSAL},
        capture_output=True,
        text=True,
        check=False,
    )
    result = results.read(file)
    parts = {part["name"]: part for part in result["parts"]}
    assert list(parts) == ["tests", "context-100-batch-1", "profile", "dense", "compile-times"]
    assert [name for name, part in parts.items() if not part["passed"]] == ["compile-times"]
    assert "--compile-times needs a policy that is compiled" in parts["compile-times"]["log"][-1]
    assert run.returncode == 1
    assert run.stdout.splitlines()[-1] == "failed: compile-times"
    measured = {(c["part"], c["name"]) for c in result["contenders"]}
    assert {part for part, _ in measured} == {"context-100-batch-1", "profile", "dense"}
    assert {name for part, name in measured if part == "context-100-batch-1"} == {
        "full",
        "inertiakv",
        "lazy4",
        "score_free",
    }
    assert any(c.get("profile") for c in result["contenders"])


def folder_with(tmp_path: Path, parts: str, **logs: str) -> Path:
    (tmp_path / "parts.tsv").write_text(parts)
    for name, log in logs.items():
        (tmp_path / f"{name}.log").write_text(log)
    return tmp_path


def test_skipped_tests_do_not_pass_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, "tests\t0\t3\n", tests="24 skipped in 3.00s\n")
    assert combine.main(folder, "cpu", tmp_path / "cpu.json") == 0
    assert combine.main(folder, "cuda", tmp_path / "cuda.json") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: tests"


def test_nothing_measured_is_still_written_down(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, "tests\t0\t3\nbench\t124\t0\n", tests="1 passed\n", bench="no time was left\n"
    )
    assert combine.main(folder, "cuda", tmp_path / "result.json") == 1
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["contenders"] == []
    assert written["parts"][1] == {
        "name": "bench",
        "passed": False,
        "exit_code": 124,
        "seconds": 0,
        "last_line": "no time was left",
        "log": ["no time was left"],
    }
