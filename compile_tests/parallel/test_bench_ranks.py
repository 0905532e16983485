"""`scripts/bench.py` with torchrun: what it reports for a model on two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compile_tests.scripts.test_bench import EAGER, KV_TOKEN
from inertiakv.scripts import bench

ROOT = Path(__file__).resolve().parents[2]
LAYER = 2 * 64 * 32 + 2 * 64 * 16 + 3 * 64 * 64 + 2 * 64
"""Half of a layer's weights in the tiny shape: q and o, k and v, MLP; and its norms, whole."""


@pytest.mark.slow
def test_times_of_all_and_bytes_of_one(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*EAGER, "--batch", "1,3", "--device", "cpu", "--policies", "full,lazy4", "--json"]
    argv += ["--out", str(tmp_path / "out.json")]
    command = [*torchrun, "scripts/bench.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # one of them prints
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert done.stderr.count("loading tiny") == 1
    assert result["model"]["ranks"] == 2
    assert result["model"]["parameters"] == LAYER + 64 + 2 * 256 * 64
    assert result["reference"] == "full"
    names = [contender["name"] for contender in result["contenders"]]
    assert (names, result["skipped"]) == (["full", "lazy4"] * 2, [])
    for contender in result["contenders"]:
        assert contender["cache_bytes_by_formula"] == contender["kept_tokens"] * KV_TOKEN // 2
        weights = 4 * (LAYER + 64 + 256 * 64)  # without the embedding table, which is not the head
        assert contender["bytes_per_step"] == weights + contender["cache_bytes_by_formula"]
        assert contender["cache_bytes"] >= contender["cache_bytes_by_formula"]
        assert contender["ms_per_step"]["median"] > 0
    assert [c["kept_tokens_by_row"] for c in result["contenders"] if c["name"] == "lazy4"] == [
        [10],
        [10, 7, 5],
    ]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--against", "transformers"], "transformers does not take a model on 2 ranks: give --against none"),
        (["--against", "kvpress"], "kvpress does not take a model on 2 ranks: give --against none"),
        (["--compile-times"], "--compile-times starts processes of its own, and not with 2 ranks"),
    ],
)
def test_refusals(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.main(["--shape", "tiny", *argv]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
