"""From simulated results folders to reports: every table, every picture, every error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from compile_tests.evals.results import CHANGES, config, make_folder, make_record, make_records
from inertiakv import POLICIES
from inertiakv.evals import paper
from inertiakv.evals.reporting import ablations, figures, plots, tables
from inertiakv.evals.reporting.paired import against, against_table
from inertiakv.evals.reporting.suites import Suite, combine, named_options, read_run
from inertiakv.evals.reporting.table import Table, index_ranges
from inertiakv.evals.statistics import holm
from inertiakv.scripts import report

pytest.importorskip("scipy")

RULER = [f"ruler:{name}" for name in ("vt", "cwe")]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*argv: object) -> tuple[int, str, str]:
        code = report.main([str(arg) for arg in argv])
        return (code, *capsys.readouterr())

    return call


def right(share: float) -> Callable[[str, str, float | None, int], float]:
    """A score: the first samples of eight are right."""
    return lambda task, policy, compression, index: float(index < round(8 * share))


def by_policy(shares: dict[str, float]) -> Callable[[str, str, float | None, int], float]:
    return lambda task, policy, compression, index: float(index < round(8 * shares[policy]))


def suites_of(*folders: Path) -> list[Suite]:
    return combine([read_run(folder) for folder in folders])[0]


def one_suite(tmp_path: Path, records: Sequence[Any], **changes: Any) -> Suite:
    (suite,) = suites_of(make_folder(tmp_path / "one", list(records), **changes))
    return suite


def column(table: Table | None, head: str) -> list[str]:
    assert table is not None
    return [row[table.head.index(head)] for row in table.rows]


# Tables
# ----------------------------------------------------------------------------------------------------------


def test_table_1(tmp_path: Path) -> None:
    score = by_policy({"full": 1.0, "lazy4": 0.5, "tova": 0.25})
    records = make_records(RULER, 4096, ["full", "tova", "lazy4"], score, compressions=(0.9, 0.5))
    table = tables.budgets(one_suite(tmp_path, records))
    assert table is not None
    assert table.markdown(3) == (
        "### Table 1: rules and budgets, RULER (vt, cwe) at 4,096 tokens\n\nMetric: match.\n\n"
        "| rule | evicted | vt | cwe | average |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| full | - | 100.0 | 100.0 | 100.0 |\n"
        "| tova | 50 % | 25.0 | 25.0 | 25.0 |\n"
        "| lazy4 | 50 % | 50.0 | 50.0 | 50.0 |\n"
        "| tova | 90 % | 25.0 | 25.0 | 25.0 |\n"
        "| lazy4 | 90 % | 50.0 | 50.0 | 50.0 |"
    )


def test_every_rule(tmp_path: Path) -> None:
    evicted = {"compression": None, "budget_asked": 1024, "budget": 1024, "kept_tokens": 250.0}
    evicted |= {"cache_bytes": 250_000, "score": 0.0, "prediction": " \n"}
    records = [make_record("chains:sum", 512, i, "full", score=1.0) for i in range(4)]
    records += [make_record("chains:sum", 512, i, "lazy4", **evicted) for i in range(4)]
    table = tables.policies(one_suite(tmp_path, records))
    assert table.head[2] == "match"  # of a lone task the column says what it is
    assert table.rows == [
        ["full", "-", "100.0", "100.0 to 100.0", "4", "0", "1,000", "100 %", "1.0", "33.3"],
        ["lazy4", "all but 1,024", "0.0", "0.0 to 0.0", "4", "4", "250", "25 %", "0.2", "33.3"],
    ]


def test_interval_and_count_of_every_task(tmp_path: Path) -> None:
    suite = one_suite(tmp_path, make_records(RULER, 512, ["full"], right(0.5)))
    table = tables.by_task(suite)
    assert table is not None
    assert table.rows == [["full", "-", task, "match", "50.0", "12.5 to 87.5", "8"] for task in ("vt", "cwe")]


def test_sweeps_are_known_by_configs_not_by_names(tmp_path: Path) -> None:
    names = {"b": "inertiakv", "c": "inertiakv:alpha=0.0", "a": "inertiakv:alpha=0.3", "inertiakv": "tova"}
    shares = {"a": 0.5, "b": 0.75, "c": 0.25, "inertiakv": 1.0}
    records = make_records(RULER, 512, list(shares), by_policy(shares))
    told = {label: config(name) for label, name in names.items()}
    suite = one_suite(tmp_path, records, policies=told)
    (table,) = ablations.sweeps(suite)
    assert table.title == "Table 5: alpha, RULER (vt, cwe) at 512 tokens"
    assert column(table, "alpha") == ["0", "0.3", "0.8"]
    assert column(table, "average") == ["25.0", "50.0", "75.0"]


def test_table_5_beside_the_paper(tmp_path: Path) -> None:
    policies = ["inertiakv", "inertiakv:alpha=0.0", "inertiakv:alpha=0.3"]
    whole = sorted(paper._WHOLE["ruler"])
    records = list(make_records(whole, 4096, policies, right(0.5), samples=2, compressions=(0.9, 0.5)))
    (table,) = ablations.sweeps(one_suite(tmp_path, records))
    assert column(table, "evicted") == ["50 %"] * 3 + ["90 %"] * 3
    assert column(table, "paper") == ["-"] * 3 + ["53.97", "63.55", "75.60"]
    (other,) = ablations.sweeps(one_suite(tmp_path / "2", records, model={"name": "Qwen/Qwen2.5-7B"}))
    assert column(other, "paper") == ["-"] * 5 + ["79.43"]
    part = [record for record in records if record.task != "ruler:vt"]
    (less,) = ablations.sweeps(one_suite(tmp_path / "3", part))
    assert "paper" not in less.head  # twelve tasks are not the paper's thirteen


def test_other_options(tmp_path: Path) -> None:
    """What differs in one option; what follows from it does not count, and two options are no sweep."""
    policies = ["inertiakv", "cumulative", "inertiakv:coupling=temporal", "tova", "lazy4"]
    suite = one_suite(tmp_path, make_records(["ruler:vt"], 512, policies, right(0.5)))
    found = {table.title: table.rows for table in ablations.sweeps(suite)}
    assert [*found] == [
        "Options: aggregation, RULER (vt) at 512 tokens",
        "Options: coupling, RULER (vt) at 512 tokens",
    ]
    rows = found["Options: coupling, RULER (vt) at 512 tokens"]
    assert [row[0] for row in rows] == ["layer_temporal", "temporal"]


def test_table_7(tmp_path: Path) -> None:
    def score(task: str, policy: str, compression: float | None, index: int) -> float:
        return 1.0 - (compression or 0) / 2

    records = list(make_records(["ruler:vt"], 512, ["full", "lazy4"], score, compressions=(0.9, 0.5)))
    records += make_records(["ruler:vt"], 512, ["tova"], score)
    table = ablations.compression(one_suite(tmp_path, records))
    assert table is not None
    assert (table.head, table.rows) == (["rule", "50 %", "90 %"], [["lazy4", "75.0", "55.0"]])
    assert "full: 100.0." in table.note
    alone = make_records(["ruler:vt"], 512, ["full", "lazy4"], score)
    assert ablations.compression(one_suite(tmp_path / "2", alone)) is None


def test_tables_3_and_4(tmp_path: Path) -> None:
    policies = ["full", "inertiakv", "kvzip"]
    folder = make_folder(
        tmp_path / "x",
        [
            *make_records(sorted(paper._WHOLE["longbench"]), None, policies, right(0.5)),
            *make_records(["longbench-v2"], None, policies, right(0.25), compressions=(0.9, 0.5)),
            *make_records(["niah"], 512, ["full", "tova"], right(1.0)),
        ],
    )
    table = tables.main(suites_of(folder))
    assert table is not None
    niah = "needle in a haystack at 512 tokens"
    assert table.head == ["rule", "LongBench (8 tasks)", "paper", "LongBench-v2", "paper", niah]
    assert table.rows == [
        ["full", "50.0", "45.87", "25.0", "28.80", "100.0"],
        ["inertiakv", "50.0", "43.88", "25.0", "29.40", "-"],
        ["kvzip", "50.0", "41.59", "25.0", "18.10", "-"],
        ["tova", "-", "34.50", "-", "28.60", "100.0"],
    ]
    half = make_folder(
        tmp_path / "y", list(make_records(["niah"], 512, ["lazy4"], right(1), compressions=[0.5]))
    )
    assert tables.main(suites_of(half)) is None


def test_table_11(tmp_path: Path) -> None:
    folders = [
        make_folder(
            tmp_path / name,
            list(make_records(RULER, 512, policies, right(share))),
            model={"name": f"some/{name}"},
        )
        for name, share, policies in (("a", 0.5, ["full", "lazy4"]), ("b", 0.25, ["lazy4", "tova"]))
    ]
    (table,) = tables.transfer(suites_of(*folders))
    assert table.head == ["rule", "evicted", "a", "b"]
    assert table.rows == [
        ["full", "-", "50.0", "-"],
        ["lazy4", "90 %", "50.0", "25.0"],
        ["tova", "90 %", "-", "25.0"],
    ]
    assert tables.transfer(suites_of(folders[0])) == []


def test_table_12(tmp_path: Path) -> None:
    def score(task: str, policy: str, compression: float | None, index: int) -> float:
        return float(index < (6 if policy == "cumulative" and task == "ruler:vt" else 2))

    suite = one_suite(tmp_path, make_records(RULER, 512, ["inertiakv", "cumulative"], score))
    table = ablations.cumulative(suite)
    assert table is not None
    assert [row[:5] for row in table.rows] == [
        ["vt", "90 %", "25.0", "75.0", "+50.0"],
        ["cwe", "90 %", "25.0", "25.0", "0.0"],
        ["average", "90 %", "25.0", "50.0", "+25.0"],
    ]
    assert column(table, "wins") == ["4", "0", "4"]
    assert column(table, "p")[1] == column(table, "p (Holm)")[1] == "-"
    assert "3 comparisons in this table" in table.note
    assert "No t-test (-)" in table.note


def test_table_14(tmp_path: Path) -> None:
    shares = {"inertiakv": 0.5, "lazy4": 0.375, "score_free": 0.5, "lazy2": 0.625, "tova": 0.0}
    whole = sorted(paper._WHOLE["ruler"])
    table = ablations.lazy(one_suite(tmp_path, make_records(whole, 512, list(shares), by_policy(shares))))
    assert column(table, "refresh") == ["2", "4", "once"]
    assert column(table, "difference") == ["+12.5", "-12.5", "0.0"]
    assert column(table, "paper") == ["-", "-0.15", "-"]
    assert column(table, "pairs") == ["104"] * 3
    alone = make_records(RULER, 512, ["lazy4"], right(1))
    assert ablations.lazy(one_suite(tmp_path / "2", alone)) is None


def test_groups_of_longbench_v2(tmp_path: Path) -> None:
    def facts(index: int) -> dict[str, Any]:
        return {"difficulty": ["hard", "easy"][index % 2], "length": ["short", "long", "medium"][index % 3]}

    records = make_records(["longbench-v2"], None, ["full"], right(0.5), facts=facts)
    table = tables.groups(one_suite(tmp_path, records))
    assert table is not None
    assert table.head[2:] == ["all", "easy (n 4)", "hard (n 4)", "short (n 3)", "medium (n 2)", "long (n 3)"]
    assert table.rows == [["full", "-", "50.0", "50.0", "50.0", "66.7", "50.0", "33.3"]]


def test_depths_of_needles(tmp_path: Path) -> None:
    records = list(
        make_records(["niah"], 512, ["full"], right(0.5), facts=lambda i: {"depth": [100, 0][i % 2]})
    )
    table = tables.depths(one_suite(tmp_path, records))
    assert table is not None
    assert table.head[3:] == ["0 % (n 4)", "100 % (n 4)"]
    assert tables.depths(one_suite(tmp_path / "2", make_records(["niah"], 512, ["full"], right(1)))) is None


def test_rules_are_spelled_out(tmp_path: Path) -> None:
    (suite,) = suites_of(
        make_folder(
            tmp_path / "x",
            list(make_records(["niah"], 512, ["full", "inertiakv", "streaming_llm"], right(1))),
        )
    )
    assert tables.policy_options(suite.setting).rows == [
        ["full", "keeps everything"],
        ["inertiakv", "the defaults"],
        ["streaming_llm", "scorer=none, alpha=-, sinks=4"],
    ]


# Comparisons
# ----------------------------------------------------------------------------------------------------------


def test_pairs_at_the_same_budget_or_with_the_full_cache(tmp_path: Path) -> None:
    policies = ["full", "inertiakv", "lazy4"]
    records = make_records(["ruler:vt"], 512, policies, right(0.5), compressions=(0.9, 0.5))
    suite = one_suite(tmp_path, records)
    with_full = [(str(p.arm), str(p.other)) for p in against(suite, "full")]
    assert with_full == [(f"{p}@{c}", "full") for c in (0.5, 0.9) for p in ("inertiakv", "lazy4")]
    with_ours = [(str(p.arm), str(p.other)) for p in against(suite, "inertiakv")]
    assert with_ours == [("lazy4@0.5", "inertiakv@0.5"), ("lazy4@0.9", "inertiakv@0.9")]
    table = against_table(suite, "full")
    assert table is not None
    assert "4 comparisons in this table" in table.note
    assert against_table(suite, "full", by_task=True) is None  # one task


def test_p_is_adjusted_within_a_table(tmp_path: Path) -> None:
    shares = {"full": 1.0, "inertiakv": 0.75, "tova": 0.25, "lazy4": 0.5}
    suite = one_suite(tmp_path, make_records(RULER, 512, list(shares), by_policy(shares)))
    found = against(suite, "full")
    assert len({pairing.result.p for pairing in found}) == 3
    assert [pairing.adjusted for pairing in found] == holm([pairing.result.p for pairing in found])
    assert max(pairing.adjusted / pairing.result.p for pairing in found) == pytest.approx(3)


def test_missing_samples_are_told_and_pairs_are_of_common_ones(tmp_path: Path) -> None:
    shares = {"full": 1.0, "inertiakv": 0.5, "tova": 0.5, "lazy4": 0.5}
    records = [
        record
        for record in make_records(RULER, 512, list(shares), by_policy(shares))
        if not (record.policy == "inertiakv" and record.index in (1, 5, 6))
        and not (record.policy == "tova" and (record.task == "ruler:cwe" or record.index == 7))
    ]
    suite = one_suite(tmp_path, records)
    lost = tables.missing([suite])
    assert lost is not None
    assert [row[2:] for row in lost.rows] == [
        ["inertiakv@0.9", "all tasks", "5 of 8", "1, 5-6"],
        ["tova@0.9", "vt", "7 of 8", "7"],
        ["tova@0.9", "cwe", "0 of 8", "all"],
    ]
    table = tables.budgets(suite)
    assert table is not None
    assert "†: not all samples" in table.note
    assert [row[2:] for row in table.rows] == [
        ["100.0"] * 3,
        ["60.0†"] * 3,
        ["57.1†", "-", "-"],  # no average over a part of the tasks
        ["50.0"] * 3,
    ]
    paired = against_table(suite, "full")
    assert column(paired, "pairs") == ["10 of 16", "7 of 16 (1 of 2 tasks)", "16"]
    assert column(paired, "difference") == ["-40.0", "-42.9", "-50.0"]
    with_ours = column(against_table(suite, "inertiakv"), "pairs")
    assert with_ours == ["4 of 16 (1 of 2 tasks)", "10 of 16"]


def test_rules_without_a_common_sample_are_not_compared(tmp_path: Path) -> None:
    records = [
        make_record("ruler:vt", 512, i, p) for p, i in (("full", 0), ("lazy4", 1), ("tova", 0), ("tova", 1))
    ]
    suite = one_suite(tmp_path, records)
    assert [str(pairing.arm) for pairing in against(suite, "full")] == ["tova@0.9"]


# Runs
# ----------------------------------------------------------------------------------------------------------


def test_folders_are_combined_and_what_differs_is_kept_apart(tmp_path: Path) -> None:
    a, b = (list(make_records(RULER, 512, [policy], right(0.5))) for policy in ("full", "lazy4"))
    smol = {"name": "smollm2-135m", "source": "hub", "dtype": "float32"}
    folders = [
        make_folder(tmp_path / "a", a),
        make_folder(tmp_path / "b", b),
        make_folder(tmp_path / "seed", b, seed=7),
        make_folder(tmp_path / "smol", b, model=smol),
    ]
    suites, notes = combine([read_run(folder) for folder in folders])
    assert notes == []
    assert [(suite.setting.name, [*map(str, suite.arms)]) for suite in suites] == [
        ("Llama-3.1-8B-Instruct, seed 42", ["full", "lazy4@0.9"]),
        ("Llama-3.1-8B-Instruct, seed 7", ["lazy4@0.9"]),
        ("smollm2-135m", ["lazy4@0.9"]),
    ]


def test_the_same_record_twice(tmp_path: Path) -> None:
    record = make_record("ruler:vt", 512, 3, "lazy4")
    slower = dataclasses.replace(record, seconds={**record.seconds, "decode": 9.0})
    other = dataclasses.replace(record, prediction="8", score=0.0)
    a, b, c = (make_folder(tmp_path / n, [r]) for n, r in (("a", record), ("b", slower), ("c", other)))
    suites, notes = combine([read_run(a), read_run(b)])
    assert len(suites[0].of(suites[0].arms[0])) == 1
    assert notes == ["1 records are there twice, with the same answer: counted once."]
    with pytest.raises(ValueError, match=rf"lazy4 on .* sample 3 gave .* in {a} and another in {c}"):
        combine([read_run(a), read_run(c)])


def test_one_name_for_two_things(tmp_path: Path) -> None:
    record, other = (make_record("ruler:vt", 512, 0, policy) for policy in ("lazy4", "tova"))
    a = make_folder(tmp_path / "a", [record])
    prompt = make_folder(tmp_path / "b", [dataclasses.replace(other, prompt_sha256="else")])
    rule = make_folder(tmp_path / "c", [other], policies={"tova": None, "lazy4": {"refresh": 8}})
    metric = make_folder(tmp_path / "d", [other], tasks={"ruler:vt": {"metric": "f1"}})
    for folder, what in (
        (prompt, "sample 0 is one prompt in"),
        (rule, "'lazy4' is one rule in"),
        (metric, "'ruler:vt' is one metric in"),
    ):
        with pytest.raises(ValueError, match=f"{what} {a} and another in {folder}"):
            combine([read_run(a), read_run(folder)])


def test_files_of_ranks_and_a_line_that_was_not_finished(tmp_path: Path) -> None:
    made = [make_record("niah", 512, i, "full") for i in range(4)]
    folder = make_folder(tmp_path / "a", made, finished=None)
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").unlink()
    (folder / "records-0.jsonl").write_text("".join(lines[::2]))
    (folder / "records-1.jsonl").write_text(lines[1] + lines[3][:50])
    run = read_run(folder)
    assert sorted(record.index for record in run.records) == [0, 1, 2]
    half = folder / "records-1.jsonl"
    assert run.notes == [
        f"The last line of {half} was not written to its end: left out.",
        f"The run in {folder} has not finished: the same command with --resume goes on.",
    ]
    assert column(tables.runs([run]), "revision") == ["abc123 and changes"]


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("records.jsonl", lambda text: "", "there are no records in"),
        ("records.jsonl", lambda text: text + "{oops}\n", "records.jsonl, line 2 is no record"),
        ("records.jsonl", lambda text: text + "[]\n", "line 2 is no record"),
        ("records.jsonl", lambda text: text.replace('"7"', "null", 1), "prediction must be a text, got None"),
        ("records.jsonl", lambda text: text.replace('"score": 1.0', '"score": 50'), "0 to 1, got 50"),
        ("records.jsonl", lambda text: text.replace('"score": 1.0', '"score": NaN'), "0 to 1, got nan"),
        ("records.jsonl", lambda text: text.replace('"full"', '"lazy9"'), "not among the policies"),
        ("records.jsonl", lambda text: text.replace('"niah"', '"nihao"'), "not among the tasks"),
        ("run_meta.json", lambda text: text[:-1], "run_meta.json is not valid JSON"),
        ("run_meta.json", lambda text: "[]", "scripts/eval.py: it must be an object, got []"),
        ("run_meta.json", lambda text: text.replace("git_revision", "git"), "it has no git_revision"),
        ("run_meta.json", lambda text: text.replace('"name": "meta', '"nom": "meta'), "no model.name"),
    ],
)
def test_what_is_no_run(cli: Cli, tmp_path: Path, file: str, change: Any, message: str) -> None:
    folder = make_folder(tmp_path / "a", [make_record("niah", 512, 0, "full")], machine="fast")
    text = (folder / file).read_text()
    (folder / file).write_text(change(text))
    code, out, err = cli(folder)
    assert (code, out) == (2, "")
    assert message in err
    assert str(folder) in err
    assert err.count("\n") == 1


# The command
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models, RULER with all kinds of rules, needles, LongBench-v2; an answer is missing."""
    policies = ["full", "inertiakv", "lazy4", "score_free", "cumulative", "tova", *CHANGES]
    folder = tmp_path_factory.mktemp("everything")

    def score(task: str, policy: str, compression: float | None, index: int) -> float:
        return ((len(policy) + index) % 5) / 4

    def facts(index: int) -> dict[str, Any]:
        return {"difficulty": ["easy", "hard"][index % 2], "length": "short", "depth": index % 4 * 25}

    ruler = list(make_records(RULER, 512, policies, score, compressions=(0.9, 0.5)))[:-1]
    needles = [
        record
        for length in (512, 1024)
        for record in make_records(["niah"], length, policies[:3], score, facts=facts)
    ]
    choices = make_records(["longbench-v2"], None, policies[:2], right(0.5), facts=facts)
    small = make_records(RULER, 512, policies[:3], score)
    return [
        make_folder(folder / "large", [*ruler, *needles, *choices], command="eval.py --tasks <all> | tee x"),
        make_folder(folder / "small", list(small), model={"name": "small"}),
    ]


def test_everything(cli: Cli, everything: list[Path], tmp_path: Path) -> None:
    """All tables and pictures."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "out"
    code, said, err = cli(*everything, "--out", out)
    assert (code, err) == (0, "")
    assert said.split() == [str(out / "report.md")]
    made = (out / "report.md").read_text()
    titles = [line.lstrip("# ") for line in made.splitlines() if line.startswith("#")]
    for number in ("1", "5", "7", "12", "14", "11"):
        assert any(title.startswith(f"Table {number}:") for title in titles), number
    for kind in (
        *("Tables 3 and 4", "Every rule", "Every task", "Options: coupling", "Groups", "Depths"),
        *("Paired with full", "Paired with inertiakv", "Missing samples", "Runs", "Rules", "Task by task"),
        *("Score by budget", "Score by speed", "Score by alpha"),
    ):
        assert any(title.startswith(kind) for title in titles), kind
    assert "eval.py --tasks <all> | tee x\n" in made
    linked = [line.split("](")[1][:-1] for line in made.splitlines() if line.startswith("![")]
    assert len(linked) == len(set(linked)) >= 7
    assert sorted(linked) == sorted(f"plots/{file.name}" for file in (out / "plots").iterdir())


def test_every_setting_has_its_own_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda file, *_, **__: file.touch())
    names = [
        "some_model",
        "some-model",
        "Some-Model",
        "\N{GREEK SMALL LETTER PI}",
        "\N{GREEK SMALL LETTER MU}",
    ]
    names += ["x" * 300 + end for end in "ab"]
    records = list(make_records(["niah"], 512, ["full", "lazy4"], right(0.5)))
    folders = [make_folder(tmp_path / str(i), records, model={"name": name}) for i, name in enumerate(names)]
    suites = suites_of(*folders)
    made = [plots.pictures([suite], tmp_path / "plots") for suite in suites]
    assert [len(pictures) for pictures in made] == [1] * len(names)
    assert len({file.name.lower() for file in (tmp_path / "plots").iterdir()}) == len(names)


def test_reports_are_alike(cli: Cli, everything: list[Path], tmp_path: Path) -> None:
    """The same results give the same report; here without matplotlib."""
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "available", lambda: False)
        for name in ("a", "b"):
            code, _, err = cli(everything[1], "--out", tmp_path / name)
            assert code == 0
            assert err == f"note: {figures.MISSING}\n"
            texts.append((tmp_path / name / "report.md").read_text())
            assert not (tmp_path / name / "plots").exists()
    assert texts[0] == texts[1]
    assert "No plots: matplotlib is not installed" in texts[0]
    assert "No sample is missing" in texts[0]
    assert "![" not in texts[0]


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "arguments are required: DIR"),
        (["{folder}/none"], "holds no records.jsonl"),
        (["{folder}", "--nonsense"], "--nonsense"),
    ],
)
def test_command_lines_that_cannot_be(cli: Cli, tmp_path: Path, argv: list[str], message: str) -> None:
    folder = make_folder(tmp_path / "a", list(make_records(["niah"], 512, ["full", "lazy4"], right(1))))
    code, out, err = cli(*(arg.format(folder=folder) for arg in argv))
    assert (code, out) == (2, "")
    assert message in err
    assert not (folder / "report.md").exists()


# Small things
# ----------------------------------------------------------------------------------------------------------


def test_the_papers_figures_are_of_rules_that_are_there() -> None:
    for values in paper.FIGURES.values():
        for name, value in values.items():
            named_options(name)
            assert name.partition(":")[0] in POLICIES
            assert 0 <= value <= 100
    llama = paper.FIGURES["Llama-3.1-8B", "ruler"]
    assert llama["inertiakv"] == llama["inertiakv:alpha=0.8"]
    assert [len(tasks) for tasks in paper._WHOLE.values()] == [8, 13]


@pytest.mark.parametrize(
    "name, model",
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("/models/Meta-Llama-3.1-8B/", "Llama-3.1-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", None),
        ("Qwen/Qwen2.5-7B-Instruct-1M", None),
        ("smollm2-135m", None),
    ],
)
def test_models_of_the_paper(name: str, model: str | None) -> None:
    assert paper.model_of(name) == model


def test_a_task_of_the_papers(tmp_path: Path) -> None:
    task = "ruler:niah_multikey_3"
    records = make_records([task, "ruler:vt"], 512, ["full", "inertiakv"], right(0.5))
    table = tables.budgets(one_suite(tmp_path, records, model={"name": "Qwen2.5-14B"}))
    assert table is not None
    assert table.rows[1] == ["full (paper)", "-", "100.00", "-", "-"]
    assert table.rows[3] == ["inertiakv (paper)", "90 %", "0.00", "-", "-"]


def test_metrics_are_named(tmp_path: Path) -> None:
    tasks = {"ruler:vt": {"metric": "all"}, "ruler:cwe": {"metric": "part"}}
    suite = one_suite(tmp_path, make_records(RULER, 512, ["full"], right(1)), tasks=tasks)
    assert tables.metrics_note(suite) == "Metrics: all: vt; part: cwe."


def test_ranges() -> None:
    assert index_ranges([3, 17, 18, 19, 21]) == "3, 17-19, 21"
    assert index_ranges([]) == ""


def test_tables_escape_what_would_break_them() -> None:
    table = Table("<a>", "", ["x"], [["a|b <i>"]])
    assert table.markdown() == "## <a>\n\n| x |\n| --- |\n| a\\|b <i> |"
