"""What users get wrong is a ValueError that says so, before any work, and harms no conversation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from compile_tests.integrations.hf import pair
from compile_tests.tiny import (
    Spy,
    assert_same_state,
    conversation_state,
    decoder_for,
    random_prompt,
    tiny_model,
)
from inertiakv import Decoder, EvictionConfig, Sampling

MODEL = tiny_model(17, max_positions=100)
RULE = EvictionConfig(compression=0.5, sinks=2)
PROMPT = random_prompt(30)
DRAWN = Sampling(temperature=1.0, seed=[1, 2])

WRONG: list[tuple[Any, int, dict[str, Any], str]] = [
    ([], 5, {}, "batch is empty"),
    ([[]], 5, {}, "prompt 0 has no tokens"),
    (torch.empty(0, dtype=torch.int64), 5, {}, "prompt 0 has no tokens"),
    ([PROMPT, []], 5, {}, "prompt 1 has no tokens"),
    ([3, 61], 5, {}, "prompt 0 has 61"),
    ([[1], [3, -1]], 5, {}, "prompt 1 has -1"),
    ([[1.5]], 5, {}, "prompt 0 has 1.5"),
    (PROMPT, 0, {}, "max_new_tokens must be a whole number of at least 1, got 0"),
    (PROMPT, -3, {}, "max_new_tokens must be a whole number of at least 1, got -3"),
    (random_prompt(101), 1, {}, "101 tokens are more than the model's 100 positions"),
    (PROMPT, 71, {}, "at most 70 new tokens fit"),
    (PROMPT, 5, {"sampling": DRAWN}, "2 seeds for 1 prompts"),
    ([PROMPT] * 3, 5, {"sampling": DRAWN}, "2 seeds for 3 prompts"),
    (PROMPT, 5, {"eos_token_ids": list(range(65))}, "65 end-of-sequence ids"),
    ("Why?", 5, {}, r"got text: give tokenizer\(text\).input_ids"),
    (["Why?", "How?"], 5, {}, "got text"),
    (None, 5, {}, "a prompt is a list of token ids, got None"),
    ([PROMPT, 3], 5, {}, "a prompt is a list of token ids, got 3"),
    (torch.tensor(3), 5, {}, r"a prompt is a list of token ids, got tensor\(3\)"),
    ({1, 2}, 5, {}, r"a prompt is a list of token ids, got \{1, 2\}"),
    (PROMPT, "5", {}, "max_new_tokens must be a whole number of at least 1, got '5'"),  # type: ignore[list-item]
    (PROMPT, 5, {"stop": "end"}, "stop is a function, as StopStrings"),
    (PROMPT, 5, {"eos_token_ids": 3}, "eos_token_ids are token ids, got 3"),
    (PROMPT, 5, {"eos_token_ids": ["</s>"]}, "eos_token_ids are token ids, got"),
    ({"input_ids": PROMPT}, 5, {}, "got a dict: give its input_ids"),
    (PROMPT, 5, {"sampling": {"temperature": 1.0}}, r"sampling is a Sampling\(temperature"),
    ([PROMPT, [1, 2, 3]], 5, {}, "protect more tokens than the budget of 1"),
]


@pytest.mark.parametrize("prompts,new_tokens,options,match", WRONG, ids=[wrong[-1] for wrong in WRONG])
def test_a_wrong_request_does_no_work_and_leaves_the_conversation(
    prompts: Any, new_tokens: int, options: dict[str, Any], match: str
) -> None:
    spy = Spy(MODEL)
    decoder = decoder_for(spy, RULE)
    expected = decoder.generate(PROMPT, 20).tokens[0]
    start = decoder.generate(PROMPT, 9).tokens[0]
    state, calls = conversation_state(decoder), len(spy.tokens)
    with pytest.raises(ValueError, match=match):
        decoder.generate(prompts, new_tokens, **options)
    with pytest.raises(ValueError, match=match):
        next(decoder.stream(prompts, new_tokens, **options))
    assert len(spy.tokens) == calls
    assert_same_state(conversation_state(decoder), state)
    assert start + decoder.decode(11).tokens[0] == expected


@pytest.mark.parametrize(
    "options,match",
    [
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": 5, "stop": ["end"]}, "stop is a function"),
        ({"max_new_tokens": 62}, "at most 61 new tokens fit"),
        ({"max_new_tokens": 5, "sampling": DRAWN}, "2 seeds"),
        ({"max_new_tokens": 5, "eos_token_ids": list(range(65))}, "65 end-of-sequence ids"),
    ],
)
def test_a_wrong_continuation_leaves_the_conversation(options: dict[str, Any], match: str) -> None:
    decoder = decoder_for(MODEL, RULE)
    expected = decoder.generate(PROMPT, 20).tokens[0]
    start = decoder.generate(PROMPT, 10).tokens[0]
    with pytest.raises(ValueError, match=match):
        decoder.decode(**options)
    assert start + decoder.decode(10).tokens[0] == expected


def test_there_is_nothing_to_go_on_with_before_a_prompt() -> None:
    for act in (lambda d: d.decode(1), lambda d: d.extend([1]), lambda d: d.save("nowhere")):
        with pytest.raises(ValueError, match="no conversation yet"):
            act(decoder_for(MODEL, RULE))


def test_a_turn_that_is_no_number_of_tokens_long() -> None:
    decoder = decoder_for(MODEL, RULE)
    expected = decoder.generate(PROMPT, 20).tokens[0]
    start = decoder.generate(PROMPT, 10).tokens[0]
    for act in (decoder.prefill, decoder.extend):
        with pytest.raises(ValueError, match="max_new_tokens must be a whole number of at least 0"):
            act(PROMPT, max_new_tokens=1.5)  # type: ignore[operator]
    assert start + decoder.decode(10).tokens[0] == expected


def test_the_last_position_can_be_used() -> None:
    decoder = decoder_for(MODEL, RULE)
    assert len(decoder.generate(PROMPT, 70).tokens[0]) == 70
    with pytest.raises(ValueError, match="at most 1 new tokens fit"):
        decoder.decode(2)


@pytest.mark.parametrize(
    "options,match",
    [
        ({"attention": "paged"}, "unknown attention 'paged'; choose from auto, dense, flex"),
        ({"prefill_chunk": 1.5}, "prefill_chunk must be a whole number of at least 1, got 1.5"),
        ({"repeat_prefix": [[1]]}, r"repeat_prefix 0 has \[1\]"),
        ({"repeat_prefix": None}, "a repeat_prefix is a list of token ids, got None"),
        ({"repeat_prefix": torch.tensor([1, 2])}, "repeat_prefix has no effect"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1, got 0"),
    ],
)
def test_options_of_a_decoder_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        decoder_for(MODEL, RULE, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uncompiled_flex_is_refused_in_low_precision(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="needs compile=True"):
        decoder_for(tiny_model(17, dtype=dtype), RULE, attention="flex")


@pytest.mark.parametrize(
    "convert",
    [
        lambda row: row,
        tuple,
        torch.tensor,
        np.array,
        lambda row: [np.int64(token) for token in row],
        lambda row: torch.tensor(row, dtype=torch.int32),
    ],
    ids=["list", "tuple", "tensor", "array", "numpy integers", "int32"],
)
def test_prompts_may_be_any_sequence_of_ids(convert: Any) -> None:
    decoder = decoder_for(MODEL, RULE)
    other = random_prompt(12, 1)
    assert decoder.generate(convert(PROMPT), 6).tokens == decoder.generate(PROMPT, 6).tokens
    expected = decoder.generate([PROMPT, other], 6).tokens
    assert decoder.generate([convert(PROMPT), convert(other)], 6).tokens == expected
    square = decoder.generate([PROMPT, PROMPT[::-1]], 6).tokens
    assert decoder.generate(torch.tensor([PROMPT, PROMPT[::-1]]), 6).tokens == square


def test_a_draft_stays_within_the_models_positions() -> None:
    spy = Spy(tiny_model(17, max_positions=64))
    decoder = decoder_for(spy, EvictionConfig(budget=12, draft=20))
    decoder.generate(random_prompt(43), 3)
    assert max(max(map(max, positions)) for positions in spy.positions) == 63
    with pytest.raises(ValueError, match="44 tokens and 21 for a draft exceed the model's 64 positions by 1"):
        decoder.generate(random_prompt(44), 3)
    decoder.generate(random_prompt(20), 3)
    with pytest.raises(ValueError, match="46 tokens and 20 for a draft exceed the model's 64 positions by 2"):
        decoder.extend(random_prompt(23, 1), max_new_tokens=3)
    within = decoder_for(tiny_model(17, max_positions=64), EvictionConfig(budget=60, draft=20))
    assert len(within.generate(random_prompt(50), 3, eos_token_ids=[]).tokens[0]) == 3


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("act", [Decoder.prefill, Decoder.extend])
def test_what_is_broken_off_is_forgotten_and_the_next_request_is_right(act: Any) -> None:
    decoder = decoder_for(MODEL, RULE, prefill_chunk=16)
    decoder.generate(random_prompt(50), 5)
    with pytest.raises(KeyboardInterrupt):
        act(decoder, random_prompt(40, seed=2), progress=interrupt)
    with pytest.raises(ValueError, match="no conversation"):
        decoder.decode(5)
    prompt = random_prompt(70, seed=3)
    assert decoder.generate(prompt, 8).tokens == decoder_for(MODEL, RULE).generate(prompt, 8).tokens


def test_a_model_that_was_moved_is_refused() -> None:
    decoder = decoder_for(tiny_model(17, dtype=torch.float32), RULE)
    decoder.generate(PROMPT, 5)
    decoder.model.to(torch.bfloat16)  # type: ignore[attr-defined]
    for call in (lambda: decoder.decode(3), lambda: decoder.prefill(PROMPT), lambda: decoder.extend([1])):
        with pytest.raises(ValueError, match="make a new Decoder"):
            call()


def test_models_that_are_none_of_ours() -> None:
    for model, match in (
        (pair("llama")[0], "LlamaForCausalLM is a model of transformers: .* or give .*InertiaCache"),
        (torch.nn.Linear(2, 2), "Linear is no language model for a Decoder: it has no config"),
    ):
        with pytest.raises(ValueError, match=match):
            Decoder(model, RULE)  # type: ignore[arg-type]


def test_a_share_that_is_next_to_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    decoder = decoder_for(MODEL, EvictionConfig(compression=0.9))
    for _ in range(2):
        decoder.generate(random_prompt(36), 2)
    decoder.use(EvictionConfig(compression=0.9, min_budget=127))
    assert decoder.generate(random_prompt(36), 2).stats.kept_tokens == [37]
    (said,) = [record.message for record in caplog.records if record.name == "inertiakv.decoding.admission"]
    assert "keeps 3 of a prompt of 36 tokens" in said


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_decoder_is_not_copied(copied: Any) -> None:
    with pytest.raises(TypeError, match="a Decoder cannot be copied or pickled"):
        copied(decoder_for(MODEL, RULE))
