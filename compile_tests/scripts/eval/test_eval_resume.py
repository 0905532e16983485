"""A run of scripts/eval.py that goes on: after a kill, with more to ask, in a folder of another."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compile_tests.evals.fake_benchmarks import FakeDataTask, FakeTask
from compile_tests.examples import share
from compile_tests.scripts.eval.folders import ARGV, Cli, contents, run_meta
from inertiakv.evals.records import Record, RecordFile, read_records
from inertiakv.evals.reporting.suites import combine, read_run
from inertiakv.scripts import report


@pytest.mark.slow
@share(20)
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


@pytest.mark.parametrize("answered", [0, 7, 26])
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

    with monkeypatch.context() as patch:
        for task in (FakeTask, FakeDataTask):
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


@pytest.mark.slow
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
    argv = ["--tasks", "rows", "--samples", "1", "--policies", "tova", "--budget", "40", "--resume"]
    assert cli(*argv, "--out", copy).code == 0
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
