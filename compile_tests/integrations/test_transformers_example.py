"""The example with two turns, on a tiny model."""

import re
from pathlib import Path

import pytest

from compile_tests.tiny_chat import tiny_chat, tiny_tokenizer
from inertiakv.models.encoding import encode_chat
from inertiakv.scripts.examples import transformers_cache as example


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_a_further_turn_is_what_the_template_writes_behind_an_answer(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    chat = [{"role": r, "content": c} for r, c in (("user", "Who?"), ("assistant", "I."), ("user", "Why?"))]
    answer = tokenizer("I.", add_special_tokens=False).input_ids
    turns = encode_chat(tokenizer, chat[:1]) + answer + example.further_turn(tokenizer, "Why?")
    assert turns == encode_chat(tokenizer, chat)


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("lighthouse.txt", "It is late. " * 20), ("question.txt", "What is the hour?")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(example, "DEMO", tmp_path)
    example.main(str(tiny_chat(tmp_path / "model", max_positions=1024)))
    out = capsys.readouterr().out
    assert out.count(f"({example.NEW_TOKENS} tokens in") == 4
    last = out.splitlines()[-1]
    kept, seen, mega, full = map(float, re.findall(r"[\d.]+", last))
    assert kept < seen / 5
    assert mega < full
