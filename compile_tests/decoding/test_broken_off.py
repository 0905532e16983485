"""What was broken off, moved away or damaged is refused, and never goes on with half a state."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compile_tests.tiny import decoder_for, random_prompt, tiny_model
from inertiakv import Decoder, EvictionConfig, StopStrings

RULE = EvictionConfig(budget=20)


def begun(prompt_tokens: int = 60) -> Decoder:
    decoder = decoder_for(tiny_model(dtype=torch.float32), RULE, prefill_chunk=16)
    decoder.generate(random_prompt(prompt_tokens), 5)
    return decoder


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_prompt_is_no_conversation() -> None:
    decoder = begun()
    with pytest.raises(KeyboardInterrupt):
        decoder.prefill(random_prompt(60, seed=1), progress=interrupt)
    with pytest.raises(ValueError, match="no conversation"):
        decoder.decode(5)


def test_an_interrupted_turn_ends_the_conversation_and_the_next_one_is_right() -> None:
    decoder = begun()
    with pytest.raises(KeyboardInterrupt):
        decoder.extend(random_prompt(40, seed=2), progress=interrupt)
    with pytest.raises(ValueError, match="no conversation"):
        decoder.decode(5)
    prompt = random_prompt(70, seed=3)
    assert decoder.generate(prompt, 8).tokens == decoder_for(decoder.model, RULE).generate(prompt, 8).tokens


def test_a_stream_does_not_go_on_after_another_answer() -> None:
    decoder = decoder_for(tiny_model(dtype=torch.float32), None)
    stream = decoder.stream(random_prompt(100), 20)
    next(stream)
    decoder.decode(24)
    with pytest.raises(ValueError, match="gone on without it"):
        list(stream)


def test_a_model_that_was_moved_is_refused() -> None:
    decoder = begun()
    decoder.model.to(torch.bfloat16)  # type: ignore[attr-defined]
    for call in (lambda: decoder.decode(3), lambda: decoder.prefill([1, 2]), lambda: decoder.extend([1])):
        with pytest.raises(ValueError, match="make a new Decoder"):
            call()


@pytest.mark.parametrize("rows", [2, 3, 17])
def test_tokens_that_take_the_mean_in_turn_tie_exactly(rows: int) -> None:
    model, once = tiny_model(dtype=torch.float32), EvictionConfig(budget=20, refresh="once")
    prompt = random_prompt(7, seed=5)
    alone = decoder_for(model, once).generate(prompt, 60)
    batch = decoder_for(model, once).generate([prompt] * rows, 60)
    assert batch.tokens == alone.tokens * rows


@pytest.mark.parametrize("name", ["cache.layers.0.k_BGND", "rows.token_B"])
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_a_damaged_file_is_refused_and_the_conversation_stays(tmp_path: Path, name: str, damage: str) -> None:
    decoder, path = begun(), tmp_path / "saved.safetensors"
    decoder.save(path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:0] if damage == "shape" else tensors[name].to(torch.float16)
    save_file(tensors, path, metadata)
    expected = begun().decode(5).tokens
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        decoder.load(path)
    assert decoder.decode(5).tokens == expected


def test_one_stop_string_may_be_given_as_it_is() -> None:
    assert StopStrings(None, "abc").strings == ["abc"]
