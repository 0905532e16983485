"""scripts/decode.py on a tiny random model: what it prints where, and every way to use it wrongly."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_tests.tiny_chat import BOS, EOS, set_eos, tiny_chat, tiny_tokenizer
from inertiakv import EvictionConfig, StopStrings, policy
from inertiakv.scripts import decode
from inertiakv.scripts.cli import prompts
from inertiakv.scripts.cli.console import Detokenizer, StreamPrinter
from inertiakv.scripts.cli.report import agreement

ROOT = Path(__file__).resolve().parents[2]
TEXT = "The keeper counts the ships that pass, and writes down every one of them. " * 3

JSON_FIELDS = [
    *("model", "policy", "config", "rows", "cache_bytes", "full_cache_bytes", "seconds", "tokens_per_second"),
    *("refreshes", "evictions", "graphs"),
]


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """What stands behind `error: `, where that is all there is."""
        assert self.code == 2
        assert self.out == ""
        *_, last = self.err.splitlines()
        assert last.startswith("error: ")
        assert "Traceback" not in self.err
        return last.removeprefix("error: ")


Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: object, model: Path | str = folder, compile: bool = False) -> Result:
        options = ["--model", str(model), "--compile" if compile else "--no-compile"]
        capsys.readouterr()
        code = decode.main([*map(str, argv), *options])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong by itself must be found before the model is loaded."""
    monkeypatch.setattr(decode, "load_model", lambda *_, **__: pytest.fail("loaded the model"))


# Answers
# ----------------------------------------------------------------------------------------------------------


def test_json(cli: Cli, folder: Path) -> None:
    report = cli("--prompt", TEXT, "--policy", "lazy4", "--max-new-tokens", 12, "--json").json
    assert list(report) == JSON_FIELDS
    assert report["model"] == {
        "name": str(folder),
        "source": f"folder {folder}",
        "substituted": False,
        "eos_token_ids": [299, 2, 1],
        "dtype": "float32",
        "quantize": None,
        "device": "cpu",
        "ranks": 1,
    }
    assert report["policy"] == "lazy4"
    assert report["config"] == dataclasses.asdict(EvictionConfig(refresh=4, min_budget=127))
    (row,) = report["rows"]
    assert list(row) == ["prompt_tokens", "budget", "kept_tokens", "token_ids", "text", "finish_reason"]
    assert row["prompt_tokens"] == len(f"[user]{TEXT}[assistant]") + 2  # a token a byte, BOS and EOS
    assert row["budget"] == 127
    assert row["kept_tokens"] == row["budget"]
    assert len(row["token_ids"]) == 12
    assert row["text"] == tiny_tokenizer().decode(row["token_ids"], skip_special_tokens=True)
    assert row["finish_reason"] == "length"
    assert 0 < report["cache_bytes"] < report["full_cache_bytes"]
    assert list(report["seconds"]) == ["load", "compile", "prefill", "first_step", "decode"]
    assert report["seconds"]["load"] > 0
    assert report["tokens_per_second"] > 0
    # 12 tokens are fed 11 times, the last one not: the first of 11 steps scores, the fifth and the ninth.
    assert report["refreshes"] == 3
    assert report["evictions"] == row["prompt_tokens"] + 11 - row["budget"]
    assert report["graphs"] == {"compiled": 0, "stored": 0, "breaks": 0, "recompiles": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled_yet")
def test_compiled(cli: Cli) -> None:
    argv = ("--prompt", TEXT, "--max-new-tokens", 12, "--policy", "lazy4", "--json")
    eager, result = cli(*argv).json, cli(*argv, compile=True)
    assert result.json["rows"] == eager["rows"]
    assert result.json["graphs"] == {"compiled": 1, "stored": 0, "breaks": 0, "recompiles": 0}
    assert result.json["seconds"]["compile"] > 0
    assert "compiling the decode step (some 10 to 30 seconds the first time) ..." in result.err
    again = cli(*argv, compile=True)
    assert again.json["rows"] == eager["rows"]
    assert "compiling" not in again.err


def test_text_streams_and_equals_the_text_at_the_end(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("--prompt", TEXT, "--max-new-tokens", 20)
    text = cli(*argv, "--json").json["rows"][0]["text"]
    pieces: list[str] = []
    whole = StreamPrinter._print

    def show(self: StreamPrinter, text: str) -> None:
        pieces.append(text)
        whole(self, text)

    monkeypatch.setattr(StreamPrinter, "_print", show)
    for options in ((), ("--stream",)):
        pieces.clear()
        assert cli(*argv, *options).out == text + "\n"
        assert len(pieces) == 20  # the first token waits for the second, and there is an end
    pieces.clear()
    assert cli(*argv, "--no-stream").out == text + "\n"
    assert not pieces


def test_progress_and_summary_go_to_stderr(cli: Cli, folder: Path) -> None:
    result = cli("--prompt", TEXT, "--max-new-tokens", 8, "--budget", 70)
    tokens = len(f"[user]{TEXT}[assistant]") + 2
    assert result.err.startswith(f"loading {folder} ...\n")
    assert f"\nprefill of {tokens} tokens ...\n" in result.err
    summary = dict(re.findall(r"^(\S.*?) {2,}(\S.*)$", result.err, re.MULTILINE))
    assert summary["prompt tokens"] == str(tokens)
    assert summary["kept tokens"] == "70"
    assert summary["new tokens"] == "8"
    assert "compiling" not in result.err
    assert "\r" not in result.err  # no bars where there is no terminal
    assert "too few" not in result.err


def test_the_token_that_ends_an_answer_is_no_text(cli: Cli, tmp_path: Path) -> None:
    other = tiny_chat(tmp_path / "model")
    argv = ("--prompt", TEXT, "--max-new-tokens", 20, "--policy", "full")
    before = cli(*argv, "--json", model=other).json["rows"][0]["token_ids"]
    end = next(n for n in range(3, 20) if before[n] not in before[:n])
    set_eos(other, 299, before[end])  # a byte, not a special token
    row = cli(*argv, "--json", model=other).json["rows"][0]
    assert row["token_ids"] == before[: end + 1]
    assert row["finish_reason"] == "eos"
    assert row["text"] == tiny_tokenizer().decode(before[:end], skip_special_tokens=True)
    assert cli(*argv, model=other).out == row["text"] + "\n"


def test_stop_strings(cli: Cli) -> None:
    argv = ("--prompt", TEXT, "--max-new-tokens", 24)
    text = cli(*argv, "--json").json["rows"][0]["text"]
    stops = text[9:11], text[6:9]
    cut = min(text.find(stop) for stop in stops)
    options = ("--stop", f"{stops[0]}", "--stop", f"{stops[1]}")
    row = cli(*argv, *options, "--json").json["rows"][0]
    assert row["text"] == text[:cut]
    assert row["finish_reason"] == "stop"
    assert cli(*argv, *options).out == text[:cut] + "\n"


def test_the_beginning_of_a_stop_string_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    stop = StopStrings(tokenizer, ["END.", "NEVER"])
    live = StreamPrinter(Detokenizer(tokenizer, (), stop))
    tokens: list[int] = []
    shown, ended = [], []
    for token in tokenizer("NEEND.x", add_special_tokens=False).input_ids:
        tokens.append(token)
        ended.append(live(0, tokens))
        shown.append(capsys.readouterr().out)
    assert shown == ["", "", "NE", "", "", "", ""]
    assert ended == [False] * 5 + [True, True]
    live.end()
    assert capsys.readouterr().out == "\n"


def test_what_is_held_back_comes_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    live = StreamPrinter(Detokenizer(tokenizer, (), StopStrings(tokenizer, ["END."])))
    ids = tokenizer("an EN", add_special_tokens=False).input_ids
    for n in range(1, len(ids) + 1):
        assert not live(0, ids[:n])
    live.end()
    assert capsys.readouterr().out == "an EN\n"


def test_what_takes_a_while_is_told_before_the_answer(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts come between the first token and the second: in one file no line of the answer is split."""
    argv = ("--prompt", TEXT, "--policy", "rehearsed", "--max-new-tokens", 8, "--budget", 80)
    text = cli(*argv, "--json").json["rows"][0]["text"]
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        monkeypatch.setattr(sys, "stdout", log)
        monkeypatch.setattr(sys, "stderr", log)
        assert cli(*argv).code == 0
    printed = (tmp_path / "log").read_text()
    assert f"draft 2 of 2 ...\n{text}\n" in printed


def test_sampling(cli: Cli) -> None:
    argv = ("--prompt", TEXT, "--json", *["--max-new-tokens", "16", "--temperature", "1.5", "--top-k", "50"])
    argv += ("--top-p", "0.95", "--min-p", "0.01")
    first, again, other = (cli(*argv, "--seed", seed).json["rows"][0]["token_ids"] for seed in (1, 1, 2))
    assert first == again != other


def test_every_eviction_option(cli: Cli) -> None:
    chosen = (
        "--budget 60 --alpha 0.5 --coupling layer --step-alpha 0.4 --refresh once --sinks 4 --recent 0.1 "
        "--scorer random --scorer-seed 3 --layers 1 --new-token mean --pool 5 --pool-by mean "
        "--pool-at always --window 3 --reserve 0.2 --rescue 2"
    )
    argv = chosen.split()
    report = cli("--prompt", TEXT, "--policy", "lazy4", *argv, "--max-new-tokens", 4, "--json").json
    expected = EvictionConfig(
        budget=60,
        scorer="random",
        scorer_seed=3,
        layers=(1,),
        alpha=0.5,
        coupling="layer",
        step_alpha=0.4,
        refresh="once",
        new_token="mean",
        window=3,
        pool=5,
        pool_by="mean",
        pool_at="always",
        sinks=4,
        recent=0.1,
        reserve=0.2,
        rescue=2,
    )
    assert report["config"] == json.loads(json.dumps(dataclasses.asdict(expected)))
    chosen = "--policy rehearsed --draft 3 --drafts 2 --window-by mean"
    result = cli("--prompt", TEXT, *chosen.split(), "--max-new-tokens", 2, "--json")
    expected = policy("rehearsed", draft=3, drafts=2, window_by="mean", min_budget=127)
    assert result.json["config"] == dataclasses.asdict(expected)
    said = [line for line in result.err.splitlines() if "draft" in line]
    assert said == [f"rehearsing the answer: draft {number} of 2 ..." for number in (1, 2)]
    chosen = "--scope head --allocation adaptive --evict-at prompt --window 3 --after none"
    report = cli("--prompt", TEXT, *chosen.split(), "--max-new-tokens", 2, "--json").json
    expected = EvictionConfig(
        scope="head", allocation="adaptive", evict_at="prompt", window=3, after="none", min_budget=127
    )
    assert report["config"] == dataclasses.asdict(expected)
    report = cli("--prompt", TEXT, "--policy", "random", "--protect-prompt", "--max-new-tokens", 2, "--json")
    assert report.json["config"]["protect_prompt"] is True
    report = cli("--prompt", TEXT, "--aggregation", "single", "--max-new-tokens", 2, "--json").json
    assert report["config"] == dataclasses.asdict(EvictionConfig(aggregation="single", min_budget=127))


def test_the_command_line_has_every_field_of_the_config(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        decode.main(["--help"])
    assert not exit_.value.code
    text = capsys.readouterr().out
    for field in dataclasses.fields(EvictionConfig):
        assert re.search(rf"--{field.name.replace('_', '-')}[ ,]", text)
    assert "scripts/decode.py --prompt" in text
    assert "None" not in text


def test_the_default_policy_is_the_papers(cli: Cli) -> None:
    report = cli("--prompt", TEXT, "--max-new-tokens", 2, "--json").json
    assert report["policy"] == "inertiakv"
    assert report["config"]["compression"] == 0.9


# Prompts
# ----------------------------------------------------------------------------------------------------------


def test_stdin_file_and_argument_are_the_same(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT + "\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT + "\n"))
    sources = (("--prompt", TEXT), ("--prompt-file", tmp_path / "prompt.txt"), ("-",))
    rows = [cli(*source, "--max-new-tokens", 3, "--json").json["rows"] for source in sources]
    assert rows[0] == rows[1] == rows[2]


def test_several_prompts_are_one_ragged_batch(cli: Cli, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    chat.append({"role": "user", "content": TEXT})
    lines = [{"prompt": TEXT}, {"prompt": TEXT[:60]}, {"messages": chat}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    argv = ("--max-new-tokens", 6, "--policy", "lazy4")

    rows = cli("--prompts-jsonl", file, *argv, "--json").json["rows"]
    assert [row["prompt_tokens"] for row in rows] == [
        len(f"[user]{TEXT}[assistant]") + 2,
        len(f"[user]{TEXT[:60]}[assistant]") + 2,
        len(f"[user]Hi[assistant]Ho[user]{TEXT}[assistant]") + 4,
    ]
    assert rows[1] == cli("--prompt", TEXT[:60], *argv, "--json").json["rows"][0]
    printed = cli("--prompts-jsonl", file, *argv).out
    assert printed == "".join(f"--- {n} ---\n{row['text']}\n" for n, row in enumerate(rows, 1))


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """Five prompts of different lengths, some with an id."""
    lines: list[dict[str, Any]] = [{"prompt": TEXT[: 20 * n]} for n in (3, 9, 1, 7, 5)]
    lines[1]["id"], lines[4]["id"] = "second", 5.5
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_batches_answer_as_one_does(cli: Cli, jsonl: Path) -> None:
    argv = ("--prompts-jsonl", jsonl, "--max-new-tokens", 6, "--budget", 30, "--json")
    argv += ("--temperature", 1, "--seed", 3)
    whole, result = cli(*argv).json, cli(*argv, "--batch-size", 2)
    report = result.json
    assert report["rows"] == whole["rows"]
    assert [row["id"] for row in report["rows"]] == [1, "second", 3, 4, 5.5]
    assert {name: report[name] for name in ("config", "evictions")} == {
        name: whole[name] for name in ("config", "evictions")
    }
    lengths = [row["prompt_tokens"] for row in report["rows"]]
    said = re.findall(r"^prefill of (\d+) tokens \(batch (\d) of 3\) \.\.\.$", result.err, re.MULTILINE)
    one, two, three, four, five = lengths
    assert said == [(str(two + four), "1"), (str(one + five), "2"), (str(three), "3")]


def test_lines_come_as_batches_are_done(cli: Cli, jsonl: Path) -> None:
    argv = ("--prompts-jsonl", jsonl, "--max-new-tokens", 6, "--batch-size", 2, "--compare", "full")
    runs = cli(*argv, "--json").json
    expected = [
        {"policy": run["policy"]} | row
        for batch in ((1, 3), (0, 4), (2,))
        for run in (runs, runs["compared"])
        for row in (run["rows"][place] for place in batch)
    ]
    lines = [json.loads(line) for line in cli(*argv, "--jsonl").out.splitlines()]
    assert lines == expected
    assert list(lines[0])[:2] == ["id", "policy"]
    printed = cli(*argv).out
    assert re.findall("^(?:---|===) (.*) (?:---|===)$", printed, re.MULTILINE)[:4] == [
        *("inertiakv", "second", "4", "full")
    ]


def test_a_batch_that_does_not_fit_names_a_smaller_one(
    cli: Cli, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("needs 9 GiB")

    monkeypatch.setattr(decode.Decoder, "generate", fail)
    assert cli("--prompts-jsonl", jsonl).error == "needs 9 GiB; --batch-size 2 needs less"
    assert cli("--prompt", "a").error == "needs 9 GiB"


def test_system_message(cli: Cli) -> None:
    with_it = cli("--prompt", "Hello", "--system", "Be kind", "--max-new-tokens", 1, "--json").json
    assert with_it["rows"][0]["prompt_tokens"] == len("[system]Be kind[user]Hello[assistant]") + 3


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_one_bos_where_the_tokenizer_has_one(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    expected = 1 if kind == "llama" else 0
    bos: Any = tokenizer.convert_tokens_to_ids(BOS)
    for raw in (False, True):
        ids = prompts.encode(tokenizer, prompts.Prompt("Hello", "test"), raw=raw)
        assert ids.count(bos) == expected
        assert ids[:1].count(bos) == expected
        assert "Hello" in tokenizer.decode(ids)
    chat = prompts.encode(tokenizer, prompts.Prompt("Hello", "test"), raw=False, system="Be kind")
    assert chat.count(bos) == expected
    if kind == "llama":
        # A template's own output, given as text, and a template that leaves BOS to the tokenizer.
        assert prompts.encode_text(tokenizer, f"{BOS}Hello").count(bos) == 1
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
        assert prompts.encode(tokenizer, prompts.Prompt("Hello", "test"), raw=False).count(bos) == 1


def test_a_bos_that_the_tokenizer_does_not_put_is_left_out() -> None:
    tokenizer = tiny_tokenizer("qwen")
    tokenizer.bos_token = "<|im_start|>"  # as SmolLM2 has it: its template begins every message with it
    bos = tokenizer.bos_token_id
    assert prompts.encode_text(tokenizer, "Hello").count(bos) == 0
    assert prompts.encode(tokenizer, prompts.Prompt("Hello", "test"), raw=False).count(bos) == 2


def test_an_eos_that_the_tokenizer_puts_does_not_end_a_raw_text() -> None:
    tokenizer = tiny_tokenizer()
    from tokenizers import processors

    special = [(BOS, tokenizer.bos_token_id), (EOS, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        f"{BOS} $A {EOS}", None, special
    )
    assert tokenizer("x").input_ids[-1] == tokenizer.eos_token_id
    ids = prompts.encode_text(tokenizer, "Hello")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids


# Two policies
# ----------------------------------------------------------------------------------------------------------


def test_compare(cli: Cli) -> None:
    argv = ("--prompt", TEXT, "--max-new-tokens", 16)
    report = cli(*argv, "--policy", "lazy4", "--compare", "full", "--json").json
    assert list(report) == [*JSON_FIELDS, "compared", "agreement"]
    assert list(report["compared"]) == JSON_FIELDS
    assert (report["policy"], report["compared"]["policy"]) == ("lazy4", "full")
    assert report["compared"]["config"] is None
    row, other = report["rows"][0], report["compared"]["rows"][0]
    assert other["budget"] is None
    assert other["kept_tokens"] == other["prompt_tokens"] + 15
    assert report["compared"]["evictions"] == 0
    assert other == cli(*argv, "--policy", "full", "--json").json["rows"][0]
    equal = sum(a == b for a, b in zip(row["token_ids"], other["token_ids"], strict=True))
    assert report["agreement"] == equal / 16

    result = cli(*argv, "--policy", "lazy4", "--compare", "full")
    assert result.out == f"=== lazy4 ===\n{row['text']}\n=== full ===\n{other['text']}\n"
    assert re.search(r"^ +lazy4 +full$", result.err, re.MULTILINE)
    assert f"agreement: {equal / 16:.0%} of the tokens are the same" in result.err
    assert result.err.count("prefill of") == 1


@pytest.mark.parametrize("name", ["snapkv", "kvzip", "rehearsed"])
def test_one_reading_serves_both(name: str, cli: Cli) -> None:
    """A rule that scores the prompt before it decodes, one that repeats the prompt, one that drafts."""
    argv = ("--prompt", TEXT, "--max-new-tokens", 8, "--min-budget", 40, "--json")
    alone = [cli(*argv, "--policy", policy).json for policy in (name, "lazy4")]
    for pair in ((name, "lazy4"), ("lazy4", name)):
        report = cli("--prompt", TEXT, *argv[2:], "--policy", pair[0], "--compare", pair[1]).json
        assert [run["rows"] for run in (report, report["compared"])] == [
            run["rows"] for run in (alone if pair[0] == name else reversed(alone))
        ]
    one, other = report["seconds"]["prefill"], report["compared"]["seconds"]["prefill"]
    assert abs(one - other) < 0.5


def test_what_is_kept_holds_for_both_policies_and_the_rest_for_one(cli: Cli) -> None:
    argv = ("--prompt", TEXT, "--max-new-tokens", 2, "--json", "--budget", 80, "--sinks", 2)
    report = cli(*argv, "--alpha", 0.5, "--compare", "cumulative").json
    assert report["config"] == dataclasses.asdict(EvictionConfig(budget=80, sinks=2, alpha=0.5))
    assert report["compared"]["config"] == dataclasses.asdict(
        EvictionConfig(budget=80, sinks=2, aggregation="cumulative")
    )
    report = cli(*argv, "--policy", "full", "--compare", "lazy4").json
    assert report["config"] is None
    assert report["compared"]["config"] == dataclasses.asdict(EvictionConfig(budget=80, sinks=2, refresh=4))


def test_agreement_counts_the_rest_of_a_longer_answer_as_different() -> None:
    class Fake:
        def __init__(self, *tokens: list[int]) -> None:
            self.generation = self
            self.tokens = list(tokens)

    runs: Any = Fake([1, 2, 3], [4, 5]), Fake([1, 9], [4, 5, 6])
    assert agreement(*runs) == agreement(*reversed(runs)) == 3 / 6


# Remarks
# ----------------------------------------------------------------------------------------------------------


def test_a_policy_that_never_evicted_says_so(cli: Cli) -> None:
    argv = ("--prompt", TEXT, "--max-new-tokens", 5)
    tokens = len(f"[user]{TEXT}[assistant]") + 2
    result = cli(*argv, "--budget", tokens + 4)
    assert f"inertiakv never evicted: its budget of {tokens + 4} holds all {tokens + 4} tokens" in result.err
    assert result.out == cli(*argv, "--policy", "full").out
    assert "never evicted" not in cli(*argv, "--budget", tokens + 3).err
    assert "never evicted" not in cli(*argv, "--policy", "full").err


def test_a_short_prompt_keeps_what_costs_no_memory(cli: Cli) -> None:
    argv = ("--prompt", TEXT, "--max-new-tokens", 2)
    result = cli(*argv, "--compare", "lazy4", "--compression", 0.9, "--json")
    assert [run["config"]["min_budget"] for run in (result.json, result.json["compared"])] == [127, 127]
    assert "WARNING" not in result.err
    tokens = len(f"[user]{TEXT}[assistant]") + 2
    for options, least, budget in (
        (("--compression", 0.25), 127, tokens * 3 // 4),
        (("--min-budget", 1), 1, tokens // 10),
        (("--budget", 70), 1, 70),
        (("--policy", "random_after_prompt"), 1, tokens + tokens // 10),
    ):
        report = cli(*argv, *options, "--json").json
        assert (report["config"]["min_budget"], report["rows"][0]["budget"]) == (least, budget)


def test_too_small_a_budget_is_said_before_the_answer(cli: Cli) -> None:
    tokens = len(f"[user]{TEXT}[assistant]") + 2
    lines = cli("--prompt", TEXT, "--max-new-tokens", 2, "--budget", 20).err.splitlines()
    said = f"WARNING: inertiakv: 20 of {tokens} tokens kept are too few for a good answer (see --budget)"
    assert lines.index(said) < lines.index(f"prefill of {tokens} tokens ...")
    for few in (("--prompt", "Hello", "--budget", 60), ("--prompt", TEXT, "--policy", "full")):
        assert "too few" not in cli(*few, "--max-new-tokens", 2).err
    share = cli("--prompt", TEXT, "--max-new-tokens", 2, "--min-budget", 5).err
    assert share.count("too few") == 1


def test_the_default_length_makes_do_with_what_fits(cli: Cli, tmp_path: Path) -> None:
    small = tiny_chat(tmp_path / "model", max_positions=100)
    tokens = len("[user]Hello[assistant]") + 2
    result = cli("--prompt", "Hello", "--json", model=small)
    assert len(result.json["rows"][0]["token_ids"]) == 100 - tokens
    assert f"answers end after {100 - tokens} tokens at most: the model has 100 positions" in result.err
    error = cli("--prompt", "Hello", "--max-new-tokens", 90, model=small).error
    assert f"at most {100 - tokens} new tokens fit" in error
    assert "more than the model's 100 positions" in cli("--prompt", TEXT, model=small).error


# Errors
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    "argv, message",
    [
        ("", "no prompt: give --prompt TEXT, --prompt-file FILE, --prompts-jsonl FILE, or - for stdin"),
        ("--prompt a -", "one prompt source at a time, got - and --prompt"),
        ("--prompt-file a --prompts-jsonl b", "one prompt source at a time, got --prompt-file and --prompts"),
        ("Hello", "unexpected 'Hello': did you mean --prompt Hello?"),
        ("--prompt-file nowhere", "nowhere: No such file or directory"),
        ("--prompts-jsonl nowhere", "nowhere: No such file or directory"),
        ("--prompt-file .", ".: Is a directory"),
        ("--prompt a --system b --raw", "--system has no effect with --raw"),
        ("--prompt a --stream --json", "--stream has no effect with --json"),
        ("--prompt a --jsonl", "--jsonl has no effect without --prompts-jsonl"),
        ("--prompt a --batch-size 4", "--batch-size has no effect without --prompts-jsonl"),
        ("--prompts-jsonl nowhere --batch-size 0", "argument --batch-size: must be at least 1, got 0"),
        ("--prompt a --policy best", "best"),
        ("--prompt a --policy full --budget 9", "budget has no effect with policy 'full'"),
        ("--prompt a --policy full --compare lazy4 --alpha 0.5", "alpha has no effect with policy 'full'"),
        ("--prompt a --policy single --alpha 0.5", "alpha=0.5 has no effect with aggregation='single'"),
        ("--prompt a --compare inertiakv --budget 9", "--compare inertiakv would run the same policy twice"),
        ("--prompt a --policy full --compare full", "--compare full would run the same policy twice"),
        ("--prompt a --compression 0.5 --budget 9", "give compression (0.5) or budget (9), not both"),
        ("--prompt a --compression 1.5", "compression must be a number in [0, 1), got 1.5"),
        ("--prompt a --budget 0", "budget must be a whole number of at least 1, got 0"),
        ("--prompt a --refresh 0", "refresh must be a whole number of at least 1 or 'once', got 0"),
        ("--prompt a --refresh never", "--refresh"),
        ("--prompt a --max-new-tokens 0", "argument --max-new-tokens: must be at least 1, got 0"),
        ("--prompt a --top-k 5", "top_k=5 has no effect at temperature 0 (greedy)"),
        ("--prompt a --temperature -1", "temperature must be 0 (greedy) or in [0.001, 1000], got -1.0"),
        ("--prompt a --temperature warm", "--temperature"),
        ("--prompt a --dtype int8", "int8"),
        ("--prompt a --device abacus", "device 'abacus' cannot be used"),
        ("--prompt a --attention flash", "flash"),
        ("--prompt a --stop=", "--stop needs a text that is not empty"),
        ("--prompt a --refresh sometimes", "argument --refresh: expected N|once, got 'sometimes'"),
        ("--prompt a --promt b", "unrecognized arguments: --promt; did you mean --prompt?"),
        ("--prompt", "argument --prompt: expected one argument"),
    ],
)
def test_wrong_command_lines(argv: str, message: str, cli: Cli) -> None:
    result = cli(*argv.split())
    assert message in result.error
    assert result.err.count("\n") == 1


@pytest.mark.usefixtures("unloaded")
def test_words_without_an_option(cli: Cli) -> None:
    expected = "unexpected words: Hello world; did you mean --prompt 'Hello world'? (see --help)"
    assert cli("--budget", 9, "Hello", "world").error == expected


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no prompts"),
        ("\n \n", "has no prompts"),
        ('{"prompt": "a"}\nHello\n', "line 2 is not JSON"),
        ('{"prompt": "a"}\n\n["b"]\n', "line 3 must be"),
        ('{"promt": "a"}', "line 1 must be"),
        ('{"prompt": "a", "messages": []}', "line 1 must be"),
        ('{"prompt": "a", "name": 1}', "has keys prompt, name"),
        ('{"prompt": "a", "id": [1]}', "line 1: id must be a text or a number, got [1]"),
        ('{"prompt": "a", "id": null}', "line 1: id must be a text or a number, got None"),
        ("{}", "has no such object"),
        ('{"prompt": ""}', "line 1: prompt must be a text that is not empty, got ''"),
        ('{"prompt": 5}', "line 1: prompt must be a text that is not empty, got 5"),
        ('{"messages": []}', "line 1: messages must be a list of"),
        ('{"messages": "a"}', "line 1: messages must be a list of"),
        ('{"messages": [{"role": "user"}]}', "line 1: messages must be a list of"),
        ('{"messages": [{"role": "user", "content": 5}]}', "line 1: messages must be a list of"),
    ],
)
def test_wrong_jsonl(content: str, message: str, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    error = cli("--prompts-jsonl", file).error
    assert str(file) in error
    assert message in error


def test_jsonl_that_does_not_go_with_other_options(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "system", "content": "b"}]}\n')
    assert "line 2 has a system message of its own" in cli("--prompts-jsonl", file, "--system", "c").error
    assert "line 2 has messages, which need the chat template" in cli("--prompts-jsonl", file, "--raw").error
    assert "--stream takes one prompt, got 2" in cli("--prompts-jsonl", file, "--stream").error
    assert "--json for one object" in cli("--prompts-jsonl", file, "--json", "--jsonl").error
    assert "no effect with --jsonl" in cli("--prompts-jsonl", file, "--stream", "--jsonl").error
    file.write_text('{"messages": [{"role": "oracle", "content": "b"}]}\n')
    assert "line 1: role oracle is not known" in cli("--prompts-jsonl", file).error


@pytest.mark.usefixtures("unloaded")
def test_empty_prompts(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli("--prompt-file", file).error == f"the prompt is empty ({file})"
    assert cli("-").error == "the prompt is empty (stdin)"
    assert cli("--prompt", "").error == "the prompt is empty (--prompt)"
    file.write_bytes(b"caf\xe9")
    assert cli("--prompt-file", file).error == f"{file} is not UTF-8 text (byte 3)"


def test_models_that_cannot_be_loaded(cli: Cli, tmp_path: Path) -> None:
    assert "no model 'nowhere'" in cli("--prompt", "a", model="nowhere").error
    assert "no tokenizer" in cli("--prompt", "a", model=tmp_path).error
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "config.json is missing" in cli("--prompt", "a", model=tmp_path).error


def test_a_tokenizer_without_a_chat_template(cli: Cli, tmp_path: Path) -> None:
    plain = tiny_chat(tmp_path / "model")
    (plain / "chat_template.jinja").unlink()
    assert "no chat template; use --raw" in cli("--prompt", TEXT, model=plain).error
    report = cli("--prompt", TEXT, "--raw", "--max-new-tokens", 2, "--json", model=plain).json
    assert report["rows"][0]["prompt_tokens"] == len(TEXT) + 1


def test_protection_is_checked(cli: Cli) -> None:
    assert "protect more tokens than the budget" in cli("--prompt", "a", "--sinks", 200).error


@pytest.mark.parametrize(
    "raised, message",
    [
        (MemoryError("needs 9 GiB,\nbut has 2"), "needs 9 GiB, but has 2"),
        (MemoryError(), "out of memory"),
        (RuntimeError("the wheel cannot be fetched"), "the wheel cannot be fetched"),
        (ConnectionError("the hub cannot be reached"), "the hub cannot be reached"),
    ],
)
def test_errors_in_one_line(
    raised: Exception, message: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(decode, "load_model", fail)
    assert cli("--prompt", "a").error == message


def test_interrupted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "load_model", interrupt)
    result = cli("--prompt", "a", model="m")
    assert (result.code, result.out, result.err) == (130, "", "loading m ...\n")


def test_our_own_mistakes_are_not_hidden(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(decode.Decoder, "generate", break_)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        cli("--prompt", "a")


# As a program
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_program(folder: Path, tmp_path: Path) -> None:
    """As a user runs it, from any folder, whether the checkout is installed or not. That the answer is too
    long is found once the model is loaded."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "scripts" / "decode.py"), "--model", str(folder), "--no-compile"]
    command += ["--prompt", TEXT, "--max-new-tokens", "5000"]
    wrong = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert re.search(r"^error: .* new tokens fit", wrong.stderr, re.MULTILINE)


@pytest.mark.real
@pytest.mark.slow
def test_the_demos_question_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    demo = ROOT / "scripts" / "demo"
    text = (demo / "lighthouse.txt").read_text() + (demo / "question.txt").read_text()
    argv = ["--prompt", text, "--policy", "rehearsed", "--dtype", "float32", "--compare", "full"]
    argv += ["--max-new-tokens", "32", "--no-compile", "--json"]
    assert decode.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    for run in (report, report["compared"]):
        (row,) = run["rows"]
        assert "7419" in row["text"]
        assert "<|im_end|>" not in row["text"]
        assert row["finish_reason"] == "eos"
    assert report["rows"][0]["kept_tokens"] < row["kept_tokens"] / 9
