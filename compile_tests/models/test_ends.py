"""Which ids end an answer: those of config.json, generation_config.json and the tokenizer together."""

import json
from pathlib import Path
from typing import Any

import pytest

from compile_tests.models.reference import VOCAB
from compile_tests.tiny import random_prompt, tiny_model
from compile_tests.tiny_chat import set_eos, tiny_chat
from inertiakv import Decoder, EvictionConfig
from inertiakv.decoding.batch import MAX_EOS_IDS
from inertiakv.models import load_checkpoint, load_model
from inertiakv.models.config import unite_ids
from inertiakv.scripts import decode


@pytest.mark.parametrize(
    "given,expected",
    [
        ((None, None, None), ()),
        ((5, None, 7), (5, 7)),
        (([5, 6], 6, 7), (5, 6, 7)),
        (([5, -1], -1, 5), (5,)),
        (((5, 6), [], 6), (5, 6)),
        ((list(range(20)), 30), (*range(20), 30)),
    ],
)
def test_united(given: tuple[Any, ...], expected: tuple[int, ...]) -> None:
    assert unite_ids(*given) == expected


@pytest.mark.parametrize("wrong", ["2", [2, "3"], 2.0, True, {"a": 1}])
def test_what_is_no_id(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a token id or a list of them"):
        unite_ids(wrong)


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_chat(tmp_path, eos_token_id=[7, 8])
    set_eos(folder, 9, 7)
    assert load_model(folder)[0].config.eos_token_ids == (9, 7, 8, 1)
    capsys.readouterr()
    argv = ["--model", str(folder), "--prompt", "a", "--max-new-tokens", "1", "--no-compile", "--json"]
    assert decode.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["model"]["eos_token_ids"] == [9, 7, 8, 1]


def test_each_of_many_ids_ends_an_answer() -> None:
    decoder = Decoder(tiny_model(11), EvictionConfig(budget=20), compile=False)
    whole = decoder.generate(random_prompt(50), 12, eos_token_ids=[]).tokens[0]
    others = [token for token in range(VOCAB) if token not in whole][: MAX_EOS_IDS - 1]
    end = whole[5]
    out = decoder.generate(random_prompt(50), 12, eos_token_ids=[*others, end])
    assert out.tokens[0] == whole[: whole.index(end) + 1]
    assert out.finish_reasons == ["eos"]
    with pytest.raises(ValueError, match=f"{MAX_EOS_IDS + 1} end-of-sequence ids"):
        decoder.generate(random_prompt(50), 12, eos_token_ids=[*range(MAX_EOS_IDS + 1)])


def test_ends_of_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from compile_tests.models import test_convert
    from inertiakv.models.convert import convert_gguf

    file, _ = test_convert.make(tmp_path, "llama", ends={"eot": 5, "eom": 6})
    convert_gguf(file, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").config.eos_token_ids == (VOCAB - 1, 5, 6)
    assert load_model(tmp_path / "out")[0].config.eos_token_ids == (VOCAB - 1, 5, 6)
