"""scripts/eval.py in several processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.scripts.eval.folders import ARGV, MADE, ROOT, Cli, contents, run_meta
from compile_tests.tiny_chat import tiny_chat
from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.models.parallel import init_tensor_parallel
from inertiakv.scripts import eval as script
from inertiakv.scripts.evaluating.process import Process


def test_processes_share_a_run_and_others_go_on_with_it(
    cli: Cli, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        results.append(cli(*ARGV, "--out", tmp_path))
        assert results[-1].code == 0, results[-1].err
    assert contents(tmp_path) == contents(whole)
    for rank, indices in ((0, {0, 2}), (1, {1})):
        lines = (tmp_path / f"records-{rank}.jsonl").read_text().splitlines()
        assert {json.loads(line)["index"] for line in lines} == indices
    assert "9 of 27 records are in" in results[0].err
    assert [result.out.partition(" ")[0] for result in results] == ["", "task"]
    assert "27 of 27 records are in" in results[1].err
    assert run_meta(tmp_path)["ranks"] == 2
    assert "resumed" not in run_meta(tmp_path)
    assert run_meta(tmp_path)["finished"] is not None

    for rank, size in ((0, 5000), (1, 100)):
        with open(tmp_path / f"records-{rank}.jsonl", "r+b") as file:
            file.truncate(size)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert cli(*ARGV, "--out", tmp_path, "--resume").code == 0
    assert contents(tmp_path) == contents(whole)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert "config.seed was 42 and is 1" in cli(*ARGV, "--seed", 1, "--out", tmp_path, "--resume").error
    assert "has results of a run" in cli(*ARGV, "--out", tmp_path).error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_leaves_the_folder_of_another_run_alone(
    rank: int, cli: Cli, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it could be one that another process of the same command has begun."""
    (copy / "records.jsonl").rename(copy / f"records-{1 - rank}.jsonl")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    assert "ranks was 1 and is 2" in cli(*ARGV, "--out", copy).error
    error = cli(*ARGV, "--seed", 1, "--samples", 2, "--out", copy).error
    assert "is of another run" in error
    assert "config.seed was 42 and is 1" in error
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before

    (copy / f"records-{1 - rank}.jsonl").rename(copy / "records-2.jsonl")
    assert "has results of a run: go on with --resume" in cli(*ARGV, "--out", copy).error


def test_a_process_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Process.here(1) == Process(0, 1)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Process.here(1) == Process(3, 8)
    assert Process.here(2) == Process(1, 4, 2)
    with pytest.raises(ValueError, match="8 processes do not go into groups of 3"):
        Process.here(3)
    with init_tensor_parallel("cpu", 1) as joining:
        assert joining == (SINGLE_PROCESS, torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with init_tensor_parallel(None, 1) as joining:
        assert joining == (SINGLE_PROCESS, torch.device("cuda:1"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with (
        pytest.raises(ValueError, match="rank 3 needs a GPU of its own; there are 1"),
        init_tensor_parallel(None, 1),
    ):
        pass
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ValueError, match="RANK must be from 0 to WORLD_SIZE - 1, got 8 of 8"):
        Process.here(1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, LOCAL_RANK must be whole numbers"):
        Process.here(1)


@pytest.mark.slow
def test_groups_hold_a_model_and_share_the_samples(cli: Cli, tmp_path: Path) -> None:
    """Four processes, of which two and two hold a model together, write what one does."""
    model = tiny_chat(tmp_path / "model", heads=4, kv_heads=2)
    argv = ["--tasks", "made", "--lengths", "90", "--samples", "3", "--compression", "0.5", "--batch", "2"]
    argv += ["--policies", "full,lazy2,rehearsed:draft=4"]
    assert cli(*argv, "--out", tmp_path / "one", model=model).code == 0
    argv += ["--tensor-parallel-size", "2", "--out", str(tmp_path / "four"), "--model", str(model)]
    argv += ["--dtype", "float64", "--device", "cpu", "--no-compile"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "compile_tests/evals/runner.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "four") == contents(tmp_path / "one")
    names = {file.name for file in (tmp_path / "four").iterdir()}
    assert names == {"run_meta.json", "records-0.jsonl", "records-1.jsonl"}
    assert run_meta(tmp_path / "four")["ranks"] == 4
    assert run_meta(tmp_path / "four")["finished"] is not None
    assert 1 <= done.stdout.count("rehearsed") <= 2  # of the last group, or both where they end as one
    assert done.stderr.count("group 0 of 2: looking") == done.stderr.count("group 1 of 2: looking") == 1


@pytest.mark.usefixtures("unloaded")
def test_rules_that_ranks_cannot_go_by(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def init_tensor_parallel(device: str, size: int) -> Iterator[Any]:
        yield TensorParallel(0, size, "no group"), torch.device(device)

    monkeypatch.setattr(script, "init_tensor_parallel", init_tensor_parallel)
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = [*MADE.split(), "--tensor-parallel-size", 2, "--out", tmp_path / "out"]
    message = "kvzip@0.9: scorer='reconstruction' looks at all heads together: not with the model on 2 ranks"
    assert cli(*argv, "--policies", "full,kvzip").error == message
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "3 processes do not go into groups of 2" in cli(*argv).error
