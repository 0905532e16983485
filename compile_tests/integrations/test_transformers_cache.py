"""InertiaCache against our own decoder, on the same weights in float32."""

from typing import Any

import pytest
import torch

from compile_tests.integrations.hf import (
    NOTHING_EVICTED,
    Talk,
    assert_same_kept,
    decoder,
    generate,
    padded,
    pair,
    prompts,
)
from inertiakv import EvictionConfig, policy
from inertiakv.integrations import layerwise
from inertiakv.integrations.transformers import InertiaCache

RULES = {
    "inertiakv": EvictionConfig(budget=16),
    "lazy": EvictionConfig(compression=0.7, refresh=4),
    "window": EvictionConfig(budget=16, window=8, pool=3, sinks=2, recent=3, layers=(1, 2)),
    "layer": EvictionConfig(budget=16, scope="layer", scorer="value_norm"),
    "h2o": policy("h2o", budget=16),
    "streaming": policy("streaming_llm", budget=16),
    "keydiff": policy("keydiff", budget=16),
    "random": policy("random_after_prompt", budget=8),
    "snapkv": policy("snapkv", budget=16, window=8, recent=8, after="none"),
    "adakv": policy("adakv", budget=16, window=8, recent=8),
    "pyramidkv": policy("pyramidkv", budget=16, window=8, recent=8, after="recency"),
    "score_free": policy("score_free", budget=16, reserve=0.5, new_token="mean"),
}


def check(
    family: str,
    rule: EvictionConfig,
    turns: list[list[list[int]]],
    new: int,
    positions: int = 256,
    **options: Any,
) -> InertiaCache:
    """Turns of rows: the same tokens and the same cache, answer by answer."""
    theirs, ours = pair(family, max_position_embeddings=positions)
    cache, expected = InertiaCache(theirs, rule), decoder(ours, rule)
    talk = Talk(theirs, cache)
    for index, rows in enumerate(turns):
        if index == 0:
            expected.prefill(rows)
        else:
            expected.extend(rows)
        tokens = expected.decode(new, eos_token_ids=[]).tokens
        assert talk.say(rows, new, **options) == tokens
        assert_same_kept(cache, expected, len(rows))
        assert cache.kept_tokens == expected.stats.kept_tokens
        assert cache.sequence_tokens == expected.stats.sequence_tokens
    return cache


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_every_family_gives_the_decoders_tokens(family: str) -> None:
    check(family, RULES["inertiakv"], [prompts(60)], 12)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_the_decoders_tokens_in_padded_batches(rule: str) -> None:
    check("llama", RULES[rule], [prompts(60, 33, 47)], 12)


@pytest.mark.parametrize("rule", ["inertiakv", "window", "h2o", "snapkv", "adakv", "score_free"])
def test_a_further_generate_is_a_further_turn(rule: str) -> None:
    check("qwen3", RULES[rule], [prompts(60, 33), prompts(21, 9, seed=4), prompts(5, 6, seed=5)], 5)


@pytest.mark.parametrize("rule", ["inertiakv", "lazy", "window", "snapkv"])
def test_after_an_answer_of_one_token_the_prompt_goes_on(rule: str) -> None:
    theirs, ours = pair("qwen3")
    cache, expected = InertiaCache(theirs, RULES[rule]), decoder(ours, RULES[rule])
    talk, rows, turn = Talk(theirs, cache), prompts(60, 33), prompts(21, 9, seed=4)
    first = talk.say(rows, 1)
    assert cache.kept_tokens == cache.sequence_tokens == [60, 33]
    prompt = [row + answer + more for row, answer, more in zip(rows, first, turn, strict=True)]
    assert talk.say(turn, 12) == expected.generate(prompt, 12, eos_token_ids=[]).tokens
    assert_same_kept(cache, expected, 2)
    assert cache.kept_tokens == expected.stats.kept_tokens


def test_a_prompt_within_its_budget_is_scored_and_kept() -> None:
    cache = check("llama", EvictionConfig(budget=80), [prompts(60, 20)], 24)
    assert cache.kept_tokens == [80, 43]


def test_prompts_of_one_token() -> None:
    check("llama", EvictionConfig(budget=6), [prompts(1, 1)], 12)


def test_a_window_in_all_layers_is_evicted_under() -> None:
    theirs, ours = pair("mistral", sliding_window=12)
    rows = prompts(60, 40)
    cache, expected = InertiaCache(theirs, RULES["inertiakv"]), decoder(ours, RULES["inertiakv"])
    assert generate(theirs, *padded(rows), 20, cache) == expected.generate(rows, 20, eos_token_ids=[]).tokens
    assert_same_kept(cache, expected, 2)


@pytest.mark.parametrize("rule", ["inertiakv", "snapkv"])
def test_a_prompt_read_in_chunks(rule: str) -> None:
    check("llama", RULES[rule], [prompts(60, 33)], 12, prefill_chunk_size=17)


def test_nothing_evicted_is_plain_generate() -> None:
    theirs, _ = pair("llama")
    batch = padded(prompts(60, 33))
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 1.3, "num_return_sequences": 2}):
        torch.manual_seed(7)
        plain = generate(theirs, *batch, 20, **options)
        torch.manual_seed(7)
        assert generate(theirs, *batch, 20, InertiaCache(theirs, NOTHING_EVICTED), **options) == plain


def test_sampling_draws_from_the_evicted_cache() -> None:
    theirs, _ = pair("llama")
    batch = padded(prompts(60))
    answers = []
    for _ in range(2):
        torch.manual_seed(7)
        answers.append(generate(theirs, *batch, 20, InertiaCache(theirs, RULES["inertiakv"]), do_sample=True))
    torch.manual_seed(7)
    assert answers[0] == answers[1] != generate(theirs, *batch, 20, do_sample=True)


def test_memory_is_given_back() -> None:
    theirs, _ = pair("llama")
    cache = InertiaCache(theirs, EvictionConfig(budget=100))
    seen = []
    hook = theirs.register_forward_hook(lambda *_: seen.append(cache.allocated_bytes))
    generate(theirs, *padded(prompts(1500)), 4, cache)
    hook.remove()
    slot = 2 * 3 * 2 * 16 * 4  # K and V, layers, KV heads, head dim, float32
    assert seen == [1536 * slot, 128 * slot, 128 * slot, 128 * slot]
    assert cache.kept_tokens == [100]


def test_the_cache_grows_where_nothing_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "ROOM", 40)
    cache = check("llama", EvictionConfig(budget=3000, refresh="once"), [prompts(20)], 150, positions=1024)
    assert cache.slots is not None
    assert cache.slots.shape.slots == 256


def test_padding_of_a_row_that_ended_is_forgotten() -> None:
    """Where the mask of the next turn leaves it out, as plain generate then does."""
    theirs, _ = pair("llama")
    rows, turn = prompts(30, 24), prompts(7, 5, seed=8)
    whole = generate(theirs, *padded(rows), 12)
    eos = whole[1][3]
    assert eos not in whole[0] + whole[1][:3]
    answers = {}
    for name in ("plain", "inertiakv"):
        from transformers import DynamicCache

        cache = DynamicCache() if name == "plain" else InertiaCache(theirs, NOTHING_EVICTED)
        talk = Talk(theirs, cache)
        first = talk.say(rows, 12, eos_token_id=eos)
        assert first[1][4:] == [0] * 8
        talk.mask_BS[1, -8:] = 0
        answers[name] = [first, talk.say(turn, 10), talk.say(prompts(3, 3, seed=9), 10)]
        if isinstance(cache, InertiaCache):
            assert cache.sequence_tokens == [30 + 12 + 7 + 10 + 3 + 9, 24 + 4 + 5 + 10 + 3 + 9]
    assert answers["inertiakv"] == answers["plain"]


def test_conversations_that_take_turns_do_not_meet() -> None:
    theirs, _ = pair("llama")

    def talks() -> list[Talk]:
        return [Talk(theirs, InertiaCache(theirs, RULES[rule])) for rule in ("inertiakv", "h2o")]

    turns = [prompts(60, 33), prompts(9, 14, seed=4)]
    apart = [[talk.say(rows, 8) for rows in turns] for talk in talks()]
    first, second = talks()
    together = [[talk.say(rows, 8) for talk in (first, second)] for rows in turns]
    assert [list(answers) for answers in zip(*together, strict=True)] == apart


def test_reset_forgets() -> None:
    theirs, _ = pair("llama")
    batch = padded(prompts(60, 33))
    cache = InertiaCache(theirs, RULES["inertiakv"])
    first = generate(theirs, *batch, 10, cache)
    cache.reset()
    assert (cache.kept_tokens, cache.sequence_tokens, cache.allocated_bytes) == ([], [], 0)
    assert generate(theirs, *batch, 10, cache) == first
