"""What a run of scripts/eval.py writes, and what it shows meanwhile."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

from compile_tests.evals.fake_benchmarks import NEW_TOKENS
from compile_tests.scripts.eval.folders import ARGV, ROOT, Cli, contents, run_meta
from compile_tests.tiny_chat import LLAMA
from inertiakv import EvictionConfig
from inertiakv.evals.records import Mean, Record, read_records
from inertiakv.scripts.evaluating import progress


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
@pytest.mark.usefixtures("nothing_compiled_yet")
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
