"""Replaying a compiled step on a CPU: what it calls, and when it must be recorded anew."""

import copy
import gc
import weakref

import pytest
import torch

from compile_tests.tiny import compiled_steps, random_prompts, replayed_calls, tiny_model
from inertiakv import Decoder, EvictionConfig

CONFIG = EvictionConfig(budget=40, refresh=2, scorer="value_norm")
PROMPTS = random_prompts((90, 61))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model(layers=4, dtype=torch.float32)


@pytest.fixture(scope="module")
def decoder(model: torch.nn.Module) -> Decoder:
    return Decoder(model, CONFIG, compile=True)


def eager(model: torch.nn.Module, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return Decoder(model, CONFIG, compile=False).generate(prompts, tokens, eos_token_ids=[]).tokens


def test_steps_are_replayed_from_their_third_run_on(model: torch.nn.Module, decoder: Decoder) -> None:
    assert decoder.generate(PROMPTS, 24, eos_token_ids=[]).tokens == eager(model, PROMPTS, 24)
    assert {name: replayed.replays for name, replayed in compiled_steps(decoder).items()} == {
        "refresh step": True,
        "decode step": True,
    }
    # As many loops for every layer, and some before and after.
    calls = replayed_calls(decoder, "decode step")
    loops = [loop for loop, _ in calls]
    assert any(loops.count(loop) == model.config.num_layers for loop in loops)


def test_intermediate_buffers_are_shared_by_layers(decoder: Decoder) -> None:
    decoder.generate(PROMPTS, 12, eos_token_ids=[])
    calls = replayed_calls(decoder, "decode step")
    mine = {t.data_ptr() for m in (decoder.model, decoder.cache, decoder.batch) for t in tensors_of(m)}
    most = max((loop for loop, _ in calls), key=lambda wanted: sum(loop is wanted for loop, _ in calls))
    own = [{t.data_ptr() for t in args} - mine for loop, args in calls if loop is most]
    # A layer's input and output are its neighbours', and everything else is the same for all.
    assert all(len(first ^ other) <= 4 for first in own for other in own)


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_other_buffers_of_the_same_shape_are_noticed(model: torch.nn.Module, decoder: Decoder) -> None:
    """A request of another shape replaces the decode cache, and the one after it makes a third one, of the
    first one's shape, at another address."""
    first = decoder.generate(PROMPTS, 16, eos_token_ids=[]).tokens
    wide = random_prompts((90, 61, 30))
    assert decoder.generate(wide, 2, eos_token_ids=[]).tokens == eager(model, wide, 2)
    kept = copy.deepcopy(decoder.cache)  # takes the freed memory, so that the next cache lies elsewhere
    assert decoder.generate(PROMPTS, 16, eos_token_ids=[]).tokens == first
    assert kept is not None


def test_a_replaced_cache_gives_its_memory_back(decoder: Decoder) -> None:
    decoder.generate(PROMPTS, 12, eos_token_ids=[])
    assert any(replayed.replays for replayed in compiled_steps(decoder).values())
    assert decoder.cache is not None
    old = weakref.ref(decoder.cache.layers[0].k_BGND)
    decoder.generate(random_prompts((90, 61, 30)), 2, eos_token_ids=[])
    gc.collect()
    assert old() is None


def test_a_changed_weight_is_seen(decoder: Decoder) -> None:
    model = copy.deepcopy(decoder.model)
    other = Decoder(model, CONFIG, compile=True)
    before = other.generate(PROMPTS, 12, eos_token_ids=[]).tokens
    with torch.no_grad():
        for layer in model.layers:
            # New memory, as loading other weights may take, and in place.
            layer.mlp.up_proj.weight = torch.nn.Parameter(-layer.mlp.up_proj.weight, requires_grad=False)
            layer.self_attn.o_proj.weight.mul_(-1)
    after = other.generate(PROMPTS, 12, eos_token_ids=[]).tokens
    assert after == eager(model, PROMPTS, 12)
    assert after != before


def test_a_changed_submodule_is_seen(decoder: Decoder) -> None:
    model, other = copy.deepcopy(decoder.model), tiny_model(seed=5, layers=4, dtype=torch.float32)
    own = Decoder(model, CONFIG, compile=True)
    before = own.generate(PROMPTS, 12, eos_token_ids=[]).tokens
    model.lm_head, model.layers[1].mlp = other.lm_head, other.layers[1].mlp
    after = own.generate(PROMPTS, 12, eos_token_ids=[]).tokens
    assert after == eager(model, PROMPTS, 12)
    assert after != before
    with torch.no_grad():
        weight = model.layers[2].mlp.up_proj.weight
        turned = torch.nn.Parameter((-weight).t().contiguous().t(), requires_grad=False)
        model.layers[2].mlp.up_proj.weight = turned
    with pytest.raises(ValueError, match="another shape, layout or dtype"):
        own.generate(PROMPTS, 12, eos_token_ids=[])


def test_a_reset_compiler_is_noticed(model: torch.nn.Module) -> None:
    decoder = Decoder(model, CONFIG, compile=True)
    expected = eager(model, PROMPTS, 14)
    for tokens in (3, 14):
        torch._dynamo.reset()
        assert decoder.generate(PROMPTS, tokens, eos_token_ids=[]).tokens == [
            row[:tokens] for row in expected
        ]
    assert all(replayed.replays for replayed in compiled_steps(decoder).values())


def test_caches_of_former_turns_are_let_go() -> None:
    decoder = Decoder(tiny_model(layers=1, dtype=torch.float32), None, compile=True)
    decoder.generate(random_prompts((100,)), 6, eos_token_ids=[])
    decoder.extend(random_prompts((300,)), max_new_tokens=6)
    decoder.decode(6, eos_token_ids=[])
    assert decoder.cache is not None
    old = weakref.ref(decoder.cache.layers[0].k_BGND)
    decoder.generate(random_prompts((100,)), 2, eos_token_ids=[])
    gc.collect()
    assert old() is None
