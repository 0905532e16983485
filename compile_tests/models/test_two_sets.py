"""A folder with two sets of weights: the single file is read, as transformers reads it, and that is said."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_tests.models.reference import tiny_checkpoint
from compile_tests.models.test_checkpoint import assert_loads, shard
from compile_tests.tiny_chat import tiny_chat
from inertiakv.models import load_checkpoint
from inertiakv.models.checkpoint import INDEX, SINGLE, weight_files
from inertiakv.scripts import decode


def both(folder: Path) -> dict[str, torch.Tensor]:
    """Shards with their index, and a newer single file, whose tensors are returned."""
    old = load_file(folder / SINGLE)
    shard(folder)
    new = {name: tensor + 1 for name, tensor in old.items()}
    save_file(new, folder / SINGLE)
    return new


def test_the_single_file_comes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new = both(tiny_checkpoint(tmp_path))
    with caplog.at_level(logging.WARNING, "inertiakv"):
        assert_loads(tmp_path, new)
    (message,) = caplog.messages
    assert SINGLE in message
    assert INDEX in message
    assert str(tmp_path) in message

    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert torch.equal(theirs["model.norm.weight"], new["model.norm.weight"])


def test_an_index_whose_shards_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new = both(tiny_checkpoint(tmp_path))
    for file in tmp_path.glob("model-*.safetensors"):
        file.unlink()
    assert_loads(tmp_path, new)
    (tmp_path / INDEX).write_text("{")
    assert_loads(tmp_path, new)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("gone", [INDEX, SINGLE])
def test_one_set_is_nothing_to_speak_of(tmp_path: Path, gone: str, caplog: pytest.LogCaptureFixture) -> None:
    both(tiny_checkpoint(tmp_path))
    (tmp_path / gone).unlink()
    load_checkpoint(tmp_path)
    assert not caplog.messages
    assert len(weight_files(tmp_path)) == (1 if gone == INDEX else 2)


def test_it_is_seen_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both(tiny_chat(tmp_path))
    argv = ["--model", str(tmp_path), "--prompt", "a", "--max-new-tokens", "1", "--no-compile"]
    assert decode.main(argv) == 0
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if "two sets of weights" in line)
    assert line.startswith("WARNING: ")
