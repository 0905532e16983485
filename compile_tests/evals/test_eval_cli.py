"""scripts/eval.py on a tiny random model: what it writes, how it goes on after a kill, what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compile_tests.evals.benchmarks import BENCHMARKS, ESSAYS
from compile_tests.evals.made import NEW_TOKENS, Made
from compile_tests.test_decode_cli import Result
from compile_tests.tiny_chat import LLAMA, tiny_chat
from evals import registry
from evals.records import Mean, Record, RecordFile, read_records
from evals.reporting.runs import read_run
from evals.reporting.suites import combine
from inertiakv import EvictionConfig, memory
from inertiakv.ranks import ALONE, Ranks
from models.parallel import joined
from scripts import decode, report
from scripts import eval as script
from scripts.evaluating import progress
from scripts.evaluating.process import Process

ROOT = Path(__file__).resolve().parents[2]
ARGV = (
    "--tasks",
    "made,rows",
    "--lengths",
    "130,90",
    "--samples",
    3,
    "--policies",
    "full,lazy2,snapkv:window=8",
)
ARGV += ("--compression", "0.5", "--batch", 2)

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat(tmp_path_factory.mktemp("model"), max_positions=512)


@pytest.fixture(scope="module", autouse=True)
def _benchmarks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "BENCHMARKS", BENCHMARKS)
        patch.setattr(script, "load_essays", lambda source: ESSAYS)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    def run(*argv: object, model: Path | str = folder, compile: bool = False) -> Result:
        options = ["--model", str(model), "--dtype", "float64", "--device", "cpu"]
        options.append("--compile" if compile else "--no-compile")
        with pytest.MonkeyPatch.context() as patch:
            out, err = io.StringIO(), io.StringIO()
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = script.main([*map(str, argv), *options])
        return Result(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="module")
def whole(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("run") / "deep" / "out"
    result = cli(*ARGV, "--out", out)
    assert result.code == 0, result.err
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The same, to go on with."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong by itself must be found before the model is loaded."""
    monkeypatch.setattr(decode, "load_model", lambda *_, **__: pytest.fail("loaded the model"))


def contents(folder: Path) -> dict[Any, dict[str, Any]]:
    """The records of a folder, each of which is there once, without what depends on the machine and on a
    batch's other rows."""
    unlike = dict.fromkeys(("seconds", "cache_bytes"))
    return {record.key: dataclasses.asdict(record) | unlike for record in read_records(folder)}


def run_meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run_meta.json").read_text())


# What is written
# ----------------------------------------------------------------------------------------------------------


def test_records_are_of_every_sample_under_every_rule(whole: Path) -> None:
    records = read_records(whole)
    rules = [("full", None), ("lazy2", 0.5), ("snapkv:window=8", 0.5)]
    asked = [("made:short", length, index) for length in (130, 90) for index in range(3)]
    asked += [("rows", None, index) for index in range(3)]
    assert sorted(map(str, contents(whole))) == sorted(
        str((*sample, *rule, None)) for sample in asked for rule in rules
    )
    lines = [json.loads(line) for line in (whole / "records.jsonl").read_text().splitlines()]
    assert {tuple(line) for line in lines} == {tuple(field.name for field in dataclasses.fields(Record))}
    assert {r.bos_count for r in records} == {1}
    for r in records:
        assert r.budget == (None if r.policy == "full" else r.prompt_tokens // 2)
        assert (r.budget or 1e9) >= r.kept_tokens > 0


def test_run_meta_says_all_that_the_records_depend_on(whole: Path, folder: Path) -> None:
    meta = run_meta(whole)
    assert list(meta) == [
        *("command", "config", "versions", "git_revision", "model", "template", "essays", "data", "seed"),
        *("policies", "tasks", "asked", "machine", "ranks", "started", "finished"),
    ]
    assert meta["command"].startswith(
        "python scripts/eval.py --tasks made,rows --lengths 130,90 --samples 3 "
    )
    assert meta["config"] == {
        "tasks": "made,rows",
        "lengths": "130,90",
        "samples": 3,
        "seed": 42,
        "template": "chat",
        "essays": None,
        "data": None,
        "policies": "full,lazy2,snapkv:window=8",
        "compression": "0.5",
        "budget": None,
        "model": str(folder),
        "dtype": "float64",
        "device": "cpu",
        "quantize": None,
        "attention": "auto",
        "compile": False,
        "batch": 2,
        "tensor_parallel_size": 1,
        "out": str(whole),
        "resume": False,
        "json": False,
    }
    assert meta["model"] == {
        "name": str(folder),
        "source": f"folder {folder}",
        "dtype": "float64",
        "quantize": None,
    }
    assert {"python", "torch", "transformers", "inertiakv", "tokenizers", "rouge"} <= meta["versions"].keys()
    assert meta["template"] == {"kind": "chat", "sha256": hashlib.sha256(LLAMA.encode()).hexdigest()}
    assert meta["essays"] == {"name": "essays of these tests", "sha256": "e5"}
    assert meta["data"] == {"rows": "rows.jsonl (sha256 0)"}
    assert list(meta["policies"]) == ["full", "lazy2", "snapkv:window=8"]
    assert meta["policies"]["full"] is None
    config = dataclasses.asdict(EvictionConfig(refresh=2))
    assert meta["policies"]["lazy2"] == {
        name: value for name, value in config.items() if name not in ("compression", "budget")
    }
    assert meta["tasks"] == {"made:short": {"metric": "fake"}, "rows": {"metric": "fake"}}
    (asked,) = meta["asked"]
    assert asked == {
        "command": meta["command"],
        "rules": ["full", "lazy2@0.5", "snapkv:window=8@0.5"],
        "samples": {"made:short 130": 3, "made:short 90": 3, "rows": 3},
    }
    assert meta["machine"]["threads"] >= 1
    assert (meta["seed"], meta["ranks"]) == (42, 1)
    assert meta["started"] <= meta["finished"]
    if (ROOT / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}", meta["git_revision"]["commit"])


def test_the_scores_are_told_in_the_end(cli: Cli, copy: Path) -> None:
    result = cli(*ARGV, "--out", copy, "--resume", "--json")
    assert result.out.count("\n") == 1
    told = json.loads(result.out)
    assert (told["out"], told["records"]) == (str(copy), 27)
    records = [r for r in read_records(copy) if (r.task, r.length, r.policy) == ("rows", None, "lazy2")]
    (score,) = [s for s in told["scores"] if (s["task"], s["policy"]) == ("rows", "lazy2")]
    mean = sum(r.score for r in records) / 3
    assert score == {
        **{"task": "rows", "length": None, "policy": "lazy2", "compression": 0.5, "budget": None},
        **{"n": 3, "score": pytest.approx(mean)},
    }
    table = cli(*ARGV, "--out", copy, "--resume").out
    assert [line.split()[:2] for line in table.splitlines()[:2]] == [["task", "n"], ["made:short", "130"]]
    assert re.search(rf"^rows +3 .* {100 * mean:.1f} ", table, re.MULTILINE)
    assert "27 of 27 records are in" in result.err


def test_a_budget_in_tokens_and_prompts_as_they_are(cli: Cli, tmp_path: Path) -> None:
    argv = ("--tasks", "made:long", "--lengths", 100, "--samples", 2, "--policies", "inertiakv,lazy2:pool=3")
    result = cli(*argv, "--budget", "20,30", "--template", "none", "--out", tmp_path)
    assert result.code == 0, result.err
    records = read_records(tmp_path)
    assert {(r.policy, r.compression, r.budget_asked, r.budget) for r in records} == {
        (policy, None, budget, budget) for policy in ("inertiakv", "lazy2:pool=3") for budget in (20, 30)
    }
    assert {r.answer_tokens for r in records} == {NEW_TOKENS, NEW_TOKENS + 3}
    assert run_meta(tmp_path)["template"] == {"kind": "none", "sha256": None}
    assert "lazy2:pool=3@20" in result.out


@pytest.mark.slow
def test_a_compiled_run_says_the_same(cli: Cli, tmp_path: Path) -> None:
    """With batches filled up, and graphs that serve one batch after another."""
    argv = (
        "--tasks",
        "made:long",
        "--lengths",
        100,
        "--samples",
        5,
        "--policies",
        "full,lazy2",
        "--batch",
        2,
    )
    eager, compiled = (
        cli(*argv, "--out", tmp_path / name, compile=name == "compiled") for name in ("eager", "compiled")
    )
    assert contents(tmp_path / "compiled") == contents(tmp_path / "eager")
    assert eager.out == compiled.out
    said = [line for line in compiled.err.splitlines() if "compiling" in line]
    assert said == [f"compiling the {what} ..." for what in ("decode step", "decode step")]


def test_progress_and_the_time_to_go(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 110.0, 131.0, 140.0, 171.0, 172.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    bar = progress.RecordBar("eval")
    bar.begin(2, 7)
    bar.draft(1, 2)
    for _ in range(5):
        bar.update()
    bar.close()
    assert [line for line in capsys.readouterr().err.splitlines() if line] == [
        "eval: 4 of 7 records, 31 s gone, 46 s to go",
        "eval: 6 of 7 records, 71 s gone, 18 s to go",
        "eval: 7 of 7 records, 72 s gone, 0 s to go",
    ]
    assert [progress._time(seconds) for seconds in (99, 119, 5940, 3600 * 27 + 61)] == [
        *("99 s", "2 min", "99 min", "27 h 1 min"),
    ]


def test_drafts_show_on_a_terminal_until_there_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    bar = progress.RecordBar("eval")
    bar.begin(0, 3)
    bar.draft(1, 2)
    assert terminal.getvalue().endswith("rehearsing, draft 1 of 2]")
    bar.update()
    bar.bar.refresh()
    assert re.search(r"1/3 \[[^\r]*records?/s\] *$", terminal.getvalue())
    bar.close()


def test_the_table_is_cut_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = ["full", *(f"policy{i}@0.9" for i in range(6))]
    means = [Mean("niah", 1000, f"policy{i}", 0.9, None, 5, i / 10) for i in range(6)]
    means += [Mean("niah", 1000, "full", None, None, 5, 1.0)]
    means += [dataclasses.replace(mean, task="rows", length=None, n=1234, score=0.0) for mean in means]
    monkeypatch.setenv("COLUMNS", "60")
    assert progress.summary(means, rules).splitlines() == [
        "task            n   full  policy0@0.9  policy1@0.9",
        "niah 1,000      5  100.0          0.0         10.0",
        "rows        1,234    0.0          0.0          0.0",
        "",
        "task            n  policy2@0.9  policy3@0.9  policy4@0.9",
        "niah 1,000      5         20.0         30.0         40.0",
        "rows        1,234          0.0          0.0          0.0",
        "",
        "task            n  policy5@0.9",
        "niah 1,000      5         50.0",
        "rows        1,234          0.0",
    ]


# Going on
# ----------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(share=st.floats(0, 1), left=st.sampled_from(["both", "meta"]))
@example(share=0.0, left="both")
@example(share=1.0, left="both")
@example(share=0.5, left="none")
def test_a_run_that_was_killed_goes_on_and_ends_as_if_it_had_not_been(
    share: float, left: str, cli: Cli, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("killed")
    data = (whole / "records.jsonl").read_bytes()
    kept = data[: round(share * len(data))]
    if left != "none":
        meta = run_meta(whole) | {"finished": None}
        (out / "run_meta.json").write_text(json.dumps(meta))
        (out / "run_meta.json.part").write_text("{")
    if left == "both":
        (out / "records.jsonl").write_bytes(kept)
    result = cli(*ARGV, "--out", out, "--resume")
    assert result.code == 0, result.err
    assert contents(out) == contents(whole)
    if left == "both":
        complete = kept[: kept.rfind(b"\n") + 1]
        assert (out / "records.jsonl").read_bytes().startswith(complete)
    assert run_meta(out)["finished"] is not None
    assert len(run_meta(out).get("resumed", [])) == (left != "none")


@pytest.mark.parametrize("answered", [0, 1, 7, 12, 26])
def test_a_run_that_breaks_off_leaves_what_it_has_done(
    answered: int, cli: Cli, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = 0

    def counted(method: Any) -> Any:
        def score(*args: Any) -> float:
            nonlocal scores
            if scores == answered:
                raise KeyboardInterrupt
            scores += 1
            return method(*args)

        return score

    from compile_tests.evals.rows import Rows

    with monkeypatch.context() as patch:
        for task in (Made, Rows):
            patch.setattr(task, "score", counted(task.score))
        assert cli(*ARGV, "--out", tmp_path).code == 130
    assert len(read_records(tmp_path)) == answered
    assert run_meta(tmp_path)["finished"] is None
    assert cli(*ARGV, "--out", tmp_path).error.endswith(
        "has results of a run: go on with --resume, or give another --out"
    )
    assert cli(*ARGV, "--out", tmp_path, "--resume").code == 0
    assert contents(tmp_path) == contents(whole)


def test_a_whole_run_is_not_run_again(cli: Cli, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inertiakv.Decoder.prefill", lambda *_, **__: pytest.fail("read a prompt"))
    before = (copy / "records.jsonl").read_bytes()
    assert cli(*ARGV, "--out", copy, "--resume").code == 0
    assert (copy / "records.jsonl").read_bytes() == before


def test_only_what_does_not_change_records_may_differ(cli: Cli, copy: Path) -> None:
    out, file = copy, copy / "run_meta.json"
    meta = run_meta(out)
    meta["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(meta))
    result = cli(*ARGV[:-1], 1, "--attention", "dense", "--out", out, "--resume")
    assert result.code == 0, result.err
    assert "note: since this run began, versions.torch was '1.0' and is " in result.err
    assert [list(note) for note in run_meta(out)["resumed"]] == [
        ["command", "started", "versions", "git_revision", "machine", "ranks"]
    ]
    assert "--batch 1" in run_meta(out)["resumed"][0]["command"]

    for changed, message in (
        (("--seed", 1), "config.seed was 42 and is 1"),
        (("--template", "none"), "template.kind was 'chat' and is 'none'"),
        (("--seed", 1, "--samples", 5, "--policies", "tova"), "config.seed was 42 and is 1"),
    ):
        before = file.read_bytes()
        error = cli(*ARGV, *changed, "--out", out, "--resume").error
        assert "is of another run, this one cannot go on with it: " in error
        assert message in error
        assert file.read_bytes() == before
    for key, changed, message in (
        ("essays", {"name": "changed"}, "essays.name was 'changed' and is "),
        ("data", {"rows": "changed"}, "data.rows was 'changed' and is "),
        ("model", {"name": "changed"}, "model.name was 'changed' and is "),
        ("policies", {"lazy2": {"refresh": 3}}, "policies.lazy2.refresh was 3 and is 2"),
    ):
        file.write_text(json.dumps(meta | {key: meta[key] | changed}))
        assert message in cli(*ARGV, "--out", out, "--resume").error


MORE = ("--tasks", "rows,made", "--lengths", 100, "--samples", 4, "--policies", "lazy2,tova,full")
MORE += ("--compression", "0.5", "--batch", 2)


@pytest.fixture(scope="module")
def more(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is asked for beyond `whole`, by itself; some of it is the same."""
    out = tmp_path_factory.mktemp("more")
    assert cli(*MORE, "--out", out).code == 0
    return out


@pytest.mark.parametrize("answered", [0, 10])
def test_a_run_is_extended_and_may_be_stopped_at_that(
    answered: int, cli: Cli, whole: Path, more: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = (copy / "records.jsonl").read_bytes()
    appended = RecordFile.append

    def append(self: RecordFile, record: Record) -> None:
        if len(read_records(copy)) == 27 + answered:
            raise KeyboardInterrupt
        appended(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", append)
        assert cli(*MORE, "--out", copy, "--resume").code == 130
    assert run_meta(copy)["finished"] is None
    assert cli(*ARGV, "--out", copy, "--resume").code == 0, "the first command has all of its own"
    assert run_meta(copy)["finished"] is None, "but not all that was asked for is there"
    result = cli(*MORE, "--out", copy, "--resume")
    assert result.code == 0, result.err
    assert (copy / "records.jsonl").read_bytes().startswith(alone)
    assert contents(copy) == contents(whole) | contents(more)
    assert result.out == cli(*MORE, "--out", more, "--resume").out, "the scores of what this command asks"

    meta, first, second = map(run_meta, (copy, whole, more))
    assert meta["finished"] is not None
    assert meta["config"] == first["config"]
    assert meta["asked"][:1] == first["asked"]
    assert [asked["samples"] for asked in meta["asked"][1:]] == [{"rows": 4, "made:short 100": 4}]
    for key in ("policies", "tasks", "data", "essays"):
        assert meta[key] == first[key] | second[key]
    suites, notes = combine([read_run(copy)])
    assert not notes
    assert {arm.policy for suite in suites for arm in suite.arms} == set(meta["policies"])


def test_what_another_process_is_writing_stays_as_that_one_describes_it(cli: Cli, copy: Path) -> None:
    before = run_meta(copy)
    with contextlib.closing(RecordFile(copy / "records.jsonl")):
        result = cli(*MORE, "--out", copy, "--resume")
    assert result.code == 2
    assert "another process is writing" in result.err
    assert run_meta(copy) == before


def test_an_extension_does_not_finish_what_was_there_before(cli: Cli, copy: Path) -> None:
    lines = (copy / "records.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "records.jsonl").write_bytes(b"".join(lines[:-1]))
    (copy / "run_meta.json").write_text(json.dumps(run_meta(copy) | {"finished": None}))
    argv = (
        "--tasks",
        "rows",
        "--samples",
        1,
        "--policies",
        "tova",
        "--budget",
        40,
        "--out",
        copy,
        "--resume",
    )
    assert cli(*argv).code == 0
    assert len(read_records(copy)) == 27
    assert run_meta(copy)["finished"] is None
    assert cli(*ARGV, "--out", copy, "--resume").code == 0
    assert run_meta(copy)["finished"] is not None
    assert len(read_records(copy)) == 28
    assert len(run_meta(copy)["asked"]) == 2


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    "changes, message",
    [
        ("{", "is not valid JSON: "),
        ([], "it must be an object, got []"),
        ({"model": None}, "model must be an object, got None"),
        ({"model": {}}, "it has no model.name"),
        ({"template": None}, "template must be an object, got None"),
        ({"versions": None}, "versions must be an object, got None"),
        ({"git_revision": {}}, "it has no git_revision.commit, git_revision.dirty"),
        ({"policies": ["full"]}, "policies must be an object, got ['full']"),
        ({"policies": {"full": 1}}, "policies.full must be an object, got 1"),
        ({"tasks": {"rows": {}}}, "it has no tasks.rows.metric"),
        ({"config": None}, "config must be an object, got None"),
        ({"seed": "42"}, "seed must be a whole number, got '42'"),
        ({"asked": [{}]}, "it has no asked.0.command, asked.0.rules, asked.0.samples"),
    ],
)
def test_files_that_describe_no_run(cli: Cli, copy: Path, changes: Any, message: str) -> None:
    file = copy / "run_meta.json"
    changed = run_meta(copy) | changes if isinstance(changes, dict) else changes
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    for error in (cli(*ARGV, "--out", copy, "--resume").error, report_error(copy)):
        assert error.startswith(f"{file} ")
        assert message in error


def report_error(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", err := io.StringIO())
        assert report.main([str(folder)]) == 2
    (line,) = err.getvalue().splitlines()
    return line.removeprefix("error: ")


# Several processes
# ----------------------------------------------------------------------------------------------------------


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
    with joined("cpu", 1) as joining:
        assert joining == (ALONE, torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with joined(None, 1) as joining:
        assert joining == (ALONE, torch.device("cuda:1"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="rank 3 needs a GPU of its own; there are 1"), joined(None, 1):
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
    def joined(device: str, size: int) -> Iterator[Any]:
        yield Ranks(0, size, "no group"), torch.device(device)

    monkeypatch.setattr(script, "joined", joined)
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = [*MADE.split(), "--tensor-parallel-size", 2, "--out", tmp_path / "out"]
    message = "kvzip@0.9: scorer='reconstruction' looks at all heads together: not with the model on 2 ranks"
    assert cli(*argv, "--policies", "full,kvzip").error == message
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "3 processes do not go into groups of 2" in cli(*argv).error


# Errors
# ----------------------------------------------------------------------------------------------------------

MADE = "--tasks made --lengths 100 --samples 2"


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
        (f"{MADE} --lengths 100,x", "--lengths takes numbers joined by commas, got '100,x'"),
        (f"{MADE} --lengths 0", "--lengths must be at least 1, got 0"),
        (f"{MADE} --samples 0", "--samples must be at least 1, got 0"),
        (f"{MADE} --batch 0", "--batch must be at least 1, got 0"),
        (f"{MADE} --policies best", "unknown policy 'best'"),
        (f"{MADE} --policies lazy4:pool=4", "lazy4:pool=4: pool must be an odd number of positions, got 4"),
        (f"{MADE} --compression 0.9,most", "--compression takes numbers joined by commas, got '0.9,most'"),
        (f"{MADE} --compression 1.5", "inertiakv: compression must be a number in [0, 1), got 1.5"),
        (f"{MADE} --compression 0.5 --budget 9", "give compressions or budgets, not both"),
        (f"{MADE} --budget 0", "inertiakv: budget must be a whole number of at least 1, got 0"),
        (f"{MADE} --budget 0.5", "--budget takes numbers joined by commas, got '0.5'"),
        (f"{MADE} --policies snapkv", "snapkv@0.9, --lengths 100: recent (32) protect more tokens than"),
        (f"{MADE} --policies snapkv --budget 16", "snapkv: recent (32) protect more tokens than the budget"),
        (f"{MADE} --policies full --budget 16", "have no effect on 'full'"),
        (f"{MADE} --template plain", "plain"),
        (f"{MADE} --device abacus", "device 'abacus' cannot be used"),
    ],
)
def test_wrong_command_lines(argv: str, message: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", err)
        assert script.main([*argv.split(), "--out", str(out), "--model", str(folder)]) == 2
    assert message in err.getvalue()
    assert err.getvalue().count("\n") == 1
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
    def missing(self: Any, name: str, setting: Any) -> Any:
        raise ImportError("rouge is missing: pip install -e '.[eval]'")

    monkeypatch.setattr(registry.Benchmark, "make", missing)
    assert cli(*MADE.split(), "--out", tmp_path / "out").error == "rouge is missing: pip install -e '.[eval]'"


# As a program
# ----------------------------------------------------------------------------------------------------------


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
