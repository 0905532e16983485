"""`--show-kept`: what stays of a prompt, marked in its text and as positions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from compile_tests.tiny_chat import tiny_chat
from inertiakv.scripts import decode
from inertiakv.scripts.cli import kept

TEXT = "The keeper counts the ships that pass, and writes down every one of them. " * 3
ARGV = ["--prompt", TEXT, "--max-new-tokens", "6", "--budget", "30", "--no-compile"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat(tmp_path_factory.mktemp("model"))


def run(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> tuple[str, str]:
    capsys.readouterr()
    assert decode.main([*ARGV, "--model", str(folder), *argv]) == 0, capsys.readouterr().err
    return capsys.readouterr()


def rows(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> Any:
    return json.loads(run(capsys, folder, "--json", *argv)[0])["rows"]


@pytest.mark.parametrize(
    "stays, plain, colour",
    [
        ("1111", "abcd", "<green>abcd<plain>"),
        ("1011", "a·cd", "<green>a<plain><grey>b<plain><green>cd<plain>"),
        ("0010", "[…2…]c·", "<grey>ab<plain><green>c<plain><grey>d<plain>"),
        ("0001", "[…3…]d", "[…3…]<green>d<plain>"),
    ],
)
def test_marks(stays: str, plain: str, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_SHOWN", 2)
    keep = [mark == "1" for mark in stays]
    codes = {"<green>": "\x1b[1;32m", "<grey>": "\x1b[2m", "<plain>": "\x1b[0m"}
    assert kept.marked("abcd", keep) == plain
    assert kept.marked("abcd", keep, colour=True) == re.sub("<[a-z]+>", lambda m: codes[m[0]], colour)


def test_the_prompt_is_shown_after_the_answer(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (row,) = rows(capsys, folder, "--show-kept")
    positions = row.pop("kept_positions")
    assert [row] == rows(capsys, folder)
    assert len(positions) == row["kept_tokens"] == 30
    in_prompt = [position for position in positions if position < row["prompt_tokens"]]
    out, err = run(capsys, folder, "--show-kept")
    assert out == run(capsys, folder)[0]
    head = f"\ninertiakv: {len(in_prompt)} of the prompt's {row['prompt_tokens']} tokens are kept\n"
    shown = err.split(head)[1].split("\n\n")[0]
    assert "\x1b" not in err
    gaps = re.findall(r"\[…(\d+)…\]|·", shown)
    assert sum(int(gap or 1) for gap in gaps) == row["prompt_tokens"] - len(in_prompt)


def test_a_terminal_gets_colours(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "in_colour", lambda stream: True)
    err = run(capsys, folder, "--show-kept")[1]
    plain = re.sub(r"\x1b\[[\d;]*m", "", err)
    assert plain != err
    assert TEXT in plain


def test_sets_of_layers_and_of_a_second_policy(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    argv = ("--policy", "tova", "--compare", "full", "--show-kept")
    err = run(capsys, folder, *argv)[1]
    sets = re.search(r"tokens are kept in at least one of (\d+) sets", err)
    assert sets is not None
    assert "full: " not in err
    report = json.loads(run(capsys, folder, *argv, "--json")[0])
    assert 30 <= len(report["rows"][0]["kept_positions"]) <= 30 * int(sets[1])
    whole = report["compared"]["rows"][0]
    assert whole["kept_positions"] == list(range(whole["kept_tokens"]))


def test_several_prompts(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": TEXT[:n]}) + "\n" for n in (200, 10)))
    argv = ["--prompts-jsonl", str(file), *ARGV[2:], "--model", str(folder), "--show-kept"]
    assert decode.main(argv) == 0
    err = capsys.readouterr().err
    assert re.search("prompt 1, inertiakv: .* of the prompt's .* tokens are kept\n", err)
    assert re.search(r"prompt 2, inertiakv: (\d+) of the prompt's \1 tokens are kept\n<s>\[user\]", err)


def test_nothing_to_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    assert decode.main(["--prompt", "x", "--policy", "full", "--show-kept"]) == 2
    assert "--show-kept has no effect with policy 'full'" in capsys.readouterr().err
