"""`scripts/trace.py`: its numbers, tables and texts of hand-made runs, and all of it on a tiny model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from compile_tests.scripts.test_trace_page import PRINTABLE, Shown
from compile_tests.tiny import row_state
from compile_tests.tiny_chat import BOS, EOS, set_eos, tiny_chat, tiny_tokenizer
from inertiakv import Decoder, EvictionConfig
from inertiakv.evals.diagnostics import RowTrace, cached_sets, retained_sets
from inertiakv.evals.reporting import figures
from inertiakv.models import load_model
from inertiakv.scoring.learned import LearnedScorer, save_scorer
from inertiakv.scripts import decode, trace
from inertiakv.scripts.cli.kept import pieces
from inertiakv.scripts.tracing import analysis, plots, tables, text
from inertiakv.scripts.tracing.runs import Run, choose_rules, record, record_evicting, same_steps
from inertiakv.scripts.tracing.text import LEVELS, Token, TracedText, traced_text

TEXT = "The keeper counts the ships that pass, and writes down every one of them. " * 3
TOKENIZER = tiny_tokenizer()
NAN = math.nan


def row(utilities: list[list[float]], newest: list[int], tokens: list[int], budget: int = 2) -> Run:
    """A run with these utilities, step by step; NaN where a token is not there."""
    utility_TP = torch.tensor(utilities)
    nothing_TP = torch.zeros_like(utility_TP, dtype=torch.bool)
    made = RowTrace(utility_TP, utility_TP[:, None] * NAN, nothing_TP, torch.tensor(newest))
    return Run(EvictionConfig(budget=budget), budget, tokens, made)


# Rules and runs


def test_rules_have_names_and_the_same_one_runs_once() -> None:
    names = ["inertiakv", "single"], [], ["layer_temporal", "temporal"]
    rules = choose_rules(*names, [0.5], {"budget": 9})
    assert rules.labelled == {
        "inertiakv": EvictionConfig(budget=9),
        "single": EvictionConfig(budget=9, aggregation="single"),
        "coupling layer_temporal": EvictionConfig(budget=9),
        "coupling temporal": EvictionConfig(budget=9, coupling="temporal"),
        "step_alpha 0.5": EvictionConfig(budget=9, step_alpha=0.5),
    }
    assert list(rules.distinct) == ["inertiakv", "single", "coupling temporal", "step_alpha 0.5"]


def test_scorers_are_set_against_attention() -> None:
    rules = choose_rules([], ["keydiff"], [], [], {})
    assert list(rules.scorers) == ["attention", "keydiff"]
    assert list(rules.distinct) == ["scorer attention", "scorer keydiff"]


def test_runs_are_compared_while_they_feed_the_same_tokens() -> None:
    steps = [[1.0, 1.0, NAN, NAN], [1.0, 1.0, 1.0, NAN], [1.0, 1.0, 1.0, 1.0]]
    a = row(steps, [1, 2, 3], tokens=[5, 6, 7, 8])
    b = row(steps, [1, 2, 3], tokens=[5, 6, 9, 9])
    assert [run.trace.steps for run in same_steps([a, a])] == [3, 3]
    cut = same_steps([a, b])
    assert [run.trace.steps for run in cut] == [2, 2]
    assert cut[0].trace.utility_TP.shape == (2, 3)
    # The last token of an answer is not fed.
    assert same_steps([a, row(steps, [1, 2, 3], tokens=[5, 6, 7, 1])])[0].trace.steps == 3


# Numbers and tables


def test_means_over_prompts_leave_out_what_is_not_defined() -> None:
    first: dict[str, Any] = {"a": 1.0, "b": {"c": [1.0, NAN]}, "d": NAN}
    second: dict[str, Any] = {"a": 2.0, "b": {"c": [3.0, 4.0]}, "d": NAN}
    mean = analysis.average([first, second])
    assert mean["a"] == 1.5
    assert mean["b"] == {"c": [2.0, 4.0]}
    assert math.isnan(mean["d"])
    assert analysis.plain(mean) == {"a": 1.5, "b": {"c": [2.0, 4.0]}, "d": None}
    assert json.dumps(analysis.plain([math.inf, 1 / 3, "x", 3])) == '[null, 0.333333, "x", 3]'


STATISTICS = {
    "raw_churn": 0.34,
    "ema_churn": 0.08,
    "raw_ema_jaccard": 0.5,
    "raw_evicted": 0.25,
    "at_most_one_change": 0.75,
    "boundary_margin": 0.0021,
    "score_entropy": NAN,
    "rank_changes": 0.1,
}


def test_tables() -> None:
    pairs = {"attention": {"attention": 1.0, "keydiff": 0.5}, "keydiff": {"attention": 0.5, "keydiff": 1.0}}
    mean: dict[str, Any] = {
        "rules": {"inertiakv": STATISTICS},
        "layers": {"inertiakv": {"margin_share": [0.25, 0.7, 0.05], "decided": [0.1, 0.6, 0.0]}},
        "spectrum": {
            "attention": {"spearman": [1.0, 1.0], "jaccard": [1.0, 1.0]},
            "keydiff": {"spearman": [0.5, NAN], "jaccard": [0.25, 0.75]},
        },
        "jaccard": {"layers": pairs, "ema": {a: dict.fromkeys(pairs, 0.125) for a in pairs}},
    }
    stability, agreement, jaccard, layers = tables.tables(mean)
    assert stability.rows == [["inertiakv", "34.0", "8.0", "0.500", "25.0", "75.0", "0.0021", "-", "10.0"]]
    assert agreement.rows == [
        ["0", "1.000 / 1.000", "0.500 / 0.250"],
        ["1", "1.000 / 1.000", "- / 0.750"],
        ["mean", "1.000 / 1.000", "0.500 / 0.500"],
    ]
    assert jaccard.rows[0] == ["attention", "1.000 / 0.125", "0.500 / 0.125"]
    assert layers.rows == [["0", "25.0 / 10.0"], ["1", "70.0 / 60.0"], ["before", "5.0 / 0.0"]]
    assert [table.rows for table in tables.tables(mean | {"spectrum": {}})] == [stability.rows, layers.rows]


# Texts


@given(PRINTABLE)
def test_pieces_of_a_text_make_the_text(words: str) -> None:
    ids = TOKENIZER(words, add_special_tokens=False).input_ids
    texts = pieces(TOKENIZER, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == words


def test_special_tokens_are_shown_and_control_characters_cannot_act() -> None:
    ids = [*TOKENIZER("é\x1b[31m").input_ids, TOKENIZER.eos_token_id]
    assert pieces(TOKENIZER, ids) == [BOS, "", "é", "␛", "[", "3", "1", "m", EOS]
    broken = [TOKENIZER("é", add_special_tokens=False).input_ids[0], TOKENIZER.eos_token_id]
    assert pieces(TOKENIZER, broken) == ["\N{REPLACEMENT CHARACTER}", EOS]


def traced(*tokens: tuple[str, float, int | None], title: str = "prompt 1, single") -> TracedText:
    return TracedText(title, [Token(*token) for token in tokens])


def test_levels_are_ranks_and_equals_are_alike() -> None:
    one = traced(("a", 0.0, None), ("b", 900.0, None), ("c", 0.0, 1), ("d", NAN, 0))
    low, high, same, never = one.levels
    assert never < low == same < high < LEVELS
    many = TracedText("", [Token("x", float(n), None) for n in range(5 * LEVELS)])
    assert many.levels == [n // 5 for n in range(5 * LEVELS)]


def test_a_terminal_shows_how_many_are_evicted() -> None:
    one = traced(("Two ", 3.0, None), ("of ", 0.0, 1), ("four", 1.0, 9), (" \n", 2.0, None), ("!", 4.0, None))
    shown = text.terminal(one)
    assert shown == "prompt 1, single: 3 of 5 tokens are kept\nTwo […2…] \n!"


def test_a_traced_text_tells_when_each_token_went_and_its_last_utility() -> None:
    prompt, answer = (TOKENIZER(word, add_special_tokens=False).input_ids for word in ("abc", "xyz"))
    utilities = [
        [NAN, 5.0, 1.0, 3.0, NAN],  # the first one went before that; now the 1.0 goes
        [NAN, 4.0, NAN, 2.0, 3.0],
    ]
    run = row(utilities, newest=[3, 4], tokens=answer)
    first, *others = traced_text("title", TOKENIZER, prompt, run).tokens
    assert (first.text, first.gone, math.isnan(first.utility)) == ("a", 0, True)
    assert others == [
        Token("b", 4.0, None),
        Token("c", 1.0, 1),
        Token("x", 2.0, 2, since=1),
        Token("y", 3.0, None, since=2),
    ]
    assert [token.stayed(2) for token in (first, *others)] == [0, 2, 0, 1, 1]


# Pictures


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = row([[1.0, 2.0, NAN], [NAN, 2.0, 1.0]], newest=[1, 2], tokens=[7, 8, 9])
    plots.retention(tmp_path / "retention.png", {"single": run})
    line = {"step": [2, 3], "churn": [0.5, 0.0]}
    plots.churn(tmp_path / "churn.png", {"a": {"raw": line, "ema": line}, "b": {"raw": line, "ema": line}})
    for name in ("retention", "churn"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# The program

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: object, model: Path = folder) -> tuple[int, str, str]:
        capsys.readouterr()
        code = trace.main([*map(str, argv), "--model", str(model)])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--steps 1", "argument --steps: must be at least 2, got 1"),
        ("--show --json", "--show has no effect with --json, which prints one object"),
        ("--policies none", "no rule to trace"),
        ("--policies none --couplings layer --show", "--show shows what policies keep"),
        ("--policies none --couplings layer --html x.html", "--html shows what policies keep"),
        ("--html nowhere/x.html", "--html nowhere/x.html is no file in a folder that is there"),
        ("--policies lazy5", "unknown policy 'lazy5'"),
        ("--policies full", "'full' cannot be traced"),
        ("--policies inertiakv,tova", "'tova' cannot be traced: only rules that score, for one"),
        ("--policies streaming_llm", "'streaming_llm' cannot be traced"),
        ("--couplings nonsense", "unknown coupling 'nonsense'"),
        ("--step-alphas x", "argument --step-alphas: expected X,..., got 'x'"),
        ("--step-alphas 1", "step_alpha must be a number in [0, 1), got 1.0"),
        ("--scorers learned", "give --scorer-file"),
        ("--scorers learned --scorer-file x.safetensors", "no learned scorer at x.safetensors"),
        ("--scorer-file x.safetensors", "--scorer-file has no effect"),
        ("--compression 1", "compression must be a number in [0, 1), got 1"),
        ("--budget 5 --compression 0.5", "give compression (0.5) or budget (5), not both"),
        ("--device cuda:99", "device 'cuda:99' cannot be used"),
        ("--prompt-file x", "one prompt source at a time"),
    ],
)
def test_errors_come_before_the_model(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, argv: str, message: str
) -> None:
    monkeypatch.setattr(decode, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    plain = {"--prompt": TEXT, "--scorers": "none", "--couplings": "none"}
    words = [word for option in plain if option not in argv.split() for word in (option, plain[option])]
    code, out, err = cli(*words, *argv.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize("out", ["file", "missing/out"])
def test_a_folder_that_cannot_be_made(cli: Cli, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, err = cli("--prompt", TEXT, "--scorers", "none", "--out", tmp_path / out)
    assert code == 2
    assert str(tmp_path / out) in err
    assert (tmp_path / "file").read_text() == "mine"


def test_everything(cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts, all kinds of rules, all files."""
    sizes, scorer = load_model(str(folder))[0].config, tmp_path / "scorer.safetensors"
    save_scorer(scorer, LearnedScorer(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim), {})
    monkeypatch.setattr(figures, "available", lambda: False)
    questions = tmp_path / "questions.jsonl"
    lines = [TEXT, TEXT[:90] + " <b>&amp;"]
    questions.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    code, out, err = cli(
        *("--prompts-jsonl", questions, "--steps", 6, "--policies", "inertiakv,lazy4"),
        *("--scorers", "keydiff,random,learned", "--scorer-file", scorer, "--step-alphas", "0,0.8"),
        *("--couplings", "layer_temporal,temporal", "--out", tmp_path / "out", "--json"),
        *("--html", tmp_path / "page.html"),
    )
    assert code == 0, err
    report = json.loads(out)
    assert json.loads((tmp_path / "out" / "trace.json").read_text()) == report
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["tables.md", "trace.html", "trace.json"]
    assert figures.MISSING in err
    assert [prompt["steps"] for prompt in report["prompts"]] == [6, 6]
    tokens = len(f"[user]{TEXT}[assistant]") + 2
    assert report["prompts"][0]["tokens"] == tokens
    assert report["prompts"][0]["budget"] == tokens // 10
    assert list(report["rules"]) == [
        *("inertiakv", "lazy4", "coupling layer_temporal", "coupling temporal"),
        *("step_alpha 0", "step_alpha 0.8"),
        *("scorer attention", "scorer keydiff", "scorer random", "scorer learned"),
    ]
    mean = report["mean"]
    assert mean["rules"]["inertiakv"] == mean["rules"]["scorer attention"]
    assert mean["rules"]["inertiakv"] != mean["rules"]["coupling temporal"]
    assert mean["rules"]["step_alpha 0.8"]["ema_churn"] < mean["rules"]["step_alpha 0"]["ema_churn"]
    assert mean["jaccard"]["layers"]["attention"]["attention"] == 1
    assert mean["spectrum"]["attention"]["spearman"] == [1] * len(mean["spectrum"]["attention"]["spearman"])
    assert abs(mean["spectrum"]["random"]["spearman"][0]) < 0.5
    assert sum(mean["layers"]["inertiakv"]["margin_share"]) == pytest.approx(1, abs=1e-4)
    churn = report["prompts"][0]["churn"]
    assert churn["inertiakv"]["raw"]["step"] == churn["lazy4"]["ema"]["step"] == [2, 3, 4, 5, 6]
    assert churn["lazy4"]["raw"]["step"] == [5]
    page = (tmp_path / "out" / "trace.html").read_text(encoding="utf-8")
    assert page == (tmp_path / "page.html").read_text(encoding="utf-8")
    shown = Shown(page)
    assert len(shown.texts) == 4
    assert shown.headings[0] == f"prompt 1, inertiakv: {tokens // 10} of {tokens + 6} tokens are kept"
    assert lines[1] in shown.texts[2]
    made = (tmp_path / "out" / "tables.md").read_text()
    assert "| inertiakv |" in made
    assert f"* `{report['command']}`\n" in made
    assert f"* prompts of {tokens:,} tokens, B = {tokens // 10}, 6 steps; " in made


def test_tables_and_texts_go_to_stdout(cli: Cli) -> None:
    code, out, err = cli(
        *("--prompt", TEXT, "--steps", 4, "--budget", 20, "--policies", "single"),
        *("--scorers", "none", "--couplings", "none", "--show"),
    )
    assert code == 0, err
    assert out.startswith("Stability of the sets\nrule ")
    assert "\nWhich vote decides\n" in out
    assert "Correlation" not in out
    assert re.search(r"^prompt 1, single: 20 of \d+ tokens are kept$", out, re.MULTILINE)
    assert re.search(r"\[…\d+…\]", out)
    assert "\x1b" not in out
    assert "loading" in err


def test_an_answer_may_end_sooner(cli: Cli, tmp_path: Path) -> None:
    other = tiny_chat(tmp_path / "model")
    rule = ("--policies", "none", "--scorers", "none", "--couplings", "layer")

    def traced(*argv: str) -> Any:
        code, out, err = cli("--prompt", TEXT, *rule, "--steps", 12, "--json", *argv, model=other)
        return json.loads(out)["prompts"][0] if code == 0 else err

    whole = traced()
    answer = whole["answer"]
    assert (len(answer), whole["steps"]) == (13, 12)
    end = next(token for token in answer if answer.index(token) >= 2)
    set_eos(other, end)
    assert traced()["steps"] == answer.index(end), "the token that ends an answer is not fed"
    assert traced("--ignore-eos") == whole
    for token in answer[:2]:
        set_eos(other, token)
        assert f"is over after {answer.index(token)} steps, and a change takes 2" in traced()


HOW: dict[str, Any] = {"steps": 8, "eos_token_ids": [], "compile": False}
RULES = {
    "ema": EvictionConfig(budget=10),
    "lazy, protected": EvictionConfig(budget=10, refresh=3, sinks=1, recent=0.2),
    "reserve": EvictionConfig(budget=10, reserve=0.5),
    "protected prompt": EvictionConfig(budget=3, scorer="random", aggregation="single", protect_prompt=True),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_sets_are_what_the_cache_holds(folder: Path, rule: EvictionConfig) -> None:
    """Of 8 steps, of which the first one evicts the prompt unless all of it is kept."""
    model, _ = load_model(str(folder), dtype="float64")
    source = Decoder(model, None, compile=False)
    source.prefill(list(range(40, 80)), max_new_tokens=9)
    shadow = record(source, rule, **HOW)
    assert shadow.trace.present_TP.sum(-1).tolist() == list(range(41, 49))
    run = record_evicting(source, shadow, **HOW)
    assert run.trace.newest_T.tolist() == list(range(40, 48))
    kept_TP = cached_sets(run.trace, run.budget)
    assert kept_TP.sum(-1).tolist() == [min(run.budget, 41 + step) for step in range(8)]
    assert torch.equal(kept_TP, retained_sets(run.trace, run.budget))
    assert torch.equal(kept_TP[0], retained_sets(shadow.trace, run.budget)[0])

    again = Decoder(model, rule, compile=False)
    for steps in (1, 8):
        again.take_prompt(source)
        again.decode(steps + 1, eos_token_ids=[])
        assert kept_TP[steps - 1].nonzero()[:, 0].tolist() == row_state(again.cache).kept


def test_an_answer_may_end_with_the_first_step(folder: Path) -> None:
    """With the budget it may be another answer than without."""
    model, _ = load_model(str(folder))
    source = Decoder(model, None, compile=False)
    source.prefill(list(range(40, 80)), max_new_tokens=9)
    shadow = record(source, EvictionConfig(budget=10), **HOW)
    end = shadow.tokens[1]
    assert end != shadow.tokens[0]
    run = record_evicting(source, shadow, **(HOW | {"eos_token_ids": [end]}))
    assert run.tokens == shadow.tokens[:2]
    assert run.trace.steps == 1
    assert cached_sets(run.trace, run.budget).sum() == 10
