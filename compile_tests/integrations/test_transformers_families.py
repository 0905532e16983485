"""InertiaCache in models that we do not have ourselves, against their own eager attention.

Shapes: T new tokens, Q queries, K keys, N tokens kept, V vocabulary.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.integrations.hf import NOTHING_EVICTED, OTHERS, Talk, other, prompts, states
from inertiakv import EvictionConfig
from inertiakv.integrations.transformers import InertiaCache

WINDOW = 12


@pytest.mark.parametrize("model_type", OTHERS)
def test_nothing_evicted_is_plain_generate(model_type: str) -> None:
    from transformers import DynamicCache

    model = other(model_type)
    turns = [prompts(40, 25), prompts(9, 16, seed=4)]
    plain = Talk(model, DynamicCache(config=model.config))
    talk = Talk(model, InertiaCache(model, NOTHING_EVICTED))
    for rows in turns:
        assert talk.say(rows, 16) == plain.say(rows, 16)


@torch.no_grad()
def answer(model: Any, cache: InertiaCache, prompt: list[int], new: int) -> tuple[list[int], Tensor, Tensor]:
    """All tokens fed, the logits of `new` decode steps [T, V], and what each query may see, bool [Q, K]."""
    total = len(prompt) + new
    seen_QK = torch.ones(total, total, dtype=torch.bool).tril()
    tokens, logits = list(prompt), []
    last_V = model(torch.tensor([prompt]), past_key_values=cache).logits[0, -1]
    for position in range(len(prompt), total):
        seen_QK[position, :position] = False
        seen_QK[position, states(cache, 0)[0].kept] = True
        tokens.append(int(last_V.argmax()))
        last_V = model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits[0, -1]
        logits.append(last_V)
    return tokens, torch.stack(logits), seen_QK


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gpt_oss"])
def test_evicted_layers_see_what_is_kept_and_sliding_ones_their_window(model_type: str) -> None:
    model, new = other(model_type), 20
    cache = InertiaCache(model, EvictionConfig(budget=10))
    tokens, logits_TV, seen_QK = answer(model, cache, prompts(40)[0], new)
    assert cache.kept_tokens == [10]
    assert int(seen_QK[-1].sum()) == 11

    age_QK = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    sliding_QK = (age_QK >= 0) & (age_QK < WINDOW)
    masks = {
        name: torch.where(mask_QK, 0.0, torch.finfo(torch.float32).min)[None, None]
        for name, mask_QK in (("full_attention", seen_QK), ("sliding_attention", sliding_QK))
    }
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), attention_mask=masks, use_cache=False).logits[0, -new:]
    torch.testing.assert_close(logits_TV, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_scores_are_the_attention_that_the_model_pays(model_type: str) -> None:
    """Under its soft cap, and beside its sinks."""
    model = other(model_type)
    cache = InertiaCache(model, EvictionConfig(budget=500, alpha=0.0))
    tokens, _, _ = answer(model, cache, prompts(40)[0], 1)
    with torch.no_grad():
        attention = model(torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    expected_N = attention[3][0, :, -1].mean(0)  # the last layer that does not slide
    torch.testing.assert_close(states(cache, 0)[0].utility_N, expected_N, rtol=1e-3, atol=1e-5)


def test_layers_that_score_are_named_as_the_model_counts_them() -> None:
    model = other("gemma2")
    assert InertiaCache(model, EvictionConfig(budget=9, layers=(3,))).eviction.layers == (1,)
    for layer, why in ((2, "slides over 12"), (4, "does not exist")):
        with pytest.raises(ValueError, match=f"layer {layer} cannot score: it {why}"):
            InertiaCache(model, EvictionConfig(budget=9, layers=(layer,)))


def test_layers_left_alone_count_as_memory() -> None:
    model = other("gemma2")
    cache = InertiaCache(model, EvictionConfig(budget=10))
    Talk(model, cache).say(prompts(40), 4)
    slot = 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head dim, float32
    assert cache.slots is not None
    assert cache.slots.allocated_bytes == 128 * slot
    assert cache.allocated_bytes >= 128 * slot + (WINDOW - 1) * slot
