"""What every named policy promises: how much it keeps of what, what that costs, and that nothing but a row's
own prompt decides about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_tests.examples import share
from compile_tests.tiny import (
    RowState,
    assert_same_state,
    decoder_for,
    random_prompt,
    set_states,
    spoil_unused_slots,
    tiny_model,
)
from inertiakv import POLICIES, Decoder, EvictionConfig, policy
from inertiakv.cache.slot_cache import bucket

MODEL = tiny_model(7)
LAYERS, KV_HEADS, HEAD_DIM, FLOAT64 = 2, 2, 8, 8
TOLERANCE = 1e-10
KINDS = [name for name in POLICIES if name not in ("lazy2", "lazy8", "lazy16", "score_free", "single")]
"""Policies that differ by more than by how often they score, and what they make of it."""


@dataclass(frozen=True)
class Request:
    budget: int
    prompts: list[list[int]]
    new_tokens: int

    def config(self, name: str) -> EvictionConfig | None:
        return None if name == "full" else policy(name, budget=self.budget)

    def decoder(self, name: str, **options: Any) -> Decoder:
        return decoder_for(MODEL, self.config(name), **options)

    @property
    def lengths(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]


@st.composite
def requests(draw: st.DrawFn, rows: int = 3) -> Request:
    """One prompt, or a ragged batch: some prompts are within their budget, some are far beyond it."""
    lengths = draw(st.lists(st.integers(3, 170), min_size=1, max_size=rows))
    seed = draw(st.integers(0, 1000))
    prompts = [random_prompt(length, seed + row) for row, length in enumerate(lengths)]
    # 40: all that the policies protect by number, and a few more.
    return Request(draw(st.integers(40, 140)), prompts, draw(st.integers(2, 12)))


every_policy = pytest.mark.parametrize("name", POLICIES)
AT_ONCE = ("lazy4", "h2o", "adakv", "kvzip", "rehearsed")
every_kind = pytest.mark.parametrize(
    "name", [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
few = share(20)


def states(decoder: Decoder, row: int = 0) -> list[RowState]:
    assert decoder.cache is not None
    return set_states(decoder.cache, row)


def assert_same_states(mine: list[RowState], theirs: list[RowState], tolerance: float = 0.0) -> None:
    for state, other in zip(mine, theirs, strict=True):
        assert_same_state(state, other, tolerance)


def budgets(config: EvictionConfig | None, budget: int, prompt: int) -> list[int]:
    """Of each layer, for a set there: the mean where heads share one."""
    if config is None:
        return [10**9] * LAYERS
    if config.protect_prompt:
        return [budget + prompt] * LAYERS
    if config.allocation == "pyramid" and prompt > budget:
        free, newest = budget - int(config.recent), int(config.recent)
        most = min(2 * free - free / 20, prompt - newest)
        return [newest + round(most), newest + 2 * free - round(most)]
    return [budget] * LAYERS


def promised(config: EvictionConfig, budget: int, prompt: int, length: int) -> set[int]:
    first = prompt if config.protect_prompt else config.sinks
    newest = int(budget * config.recent) if isinstance(config.recent, float) else config.recent
    return set(range(min(first, length))) | set(range(max(0, length - newest), length))


@every_policy
@few
@given(request=requests())
def test_every_set_keeps_its_budget_and_what_is_protected(name: str, request: Request) -> None:
    config, decoder = request.config(name), request.decoder(name)
    stats = decoder.generate(request.prompts, request.new_tokens).stats
    for row, prompt in enumerate(request.lengths):
        length = prompt + request.new_tokens - 1
        assert stats.sequence_tokens[row] == length
        by_layer = budgets(config, request.budget, prompt)
        assert stats.budgets[row] == (None if config is None else round(sum(by_layer) / LAYERS))
        wanted = [min(length, budget) for budget in by_layer]
        joint_budget = config is not None and config.allocation in ("adaptive", "model")
        joint_budget = joint_budget and prompt > request.budget
        counts: dict[int, list[int]] = {}
        for state in states(decoder, row):
            for layer in state.layers:
                counts.setdefault(layer, []).append(len(state.kept))
            if config is not None:
                assert promised(config, request.budget, prompt, length) <= set(state.kept)
                assert set(state.kept) <= set(range(length))
        for layer, of_sets in counts.items():
            if joint_budget:
                assert config is not None
                assert min(of_sets) >= config.sinks + int(config.recent)
                if config.allocation == "adaptive":
                    assert sum(of_sets) == wanted[layer] * len(of_sets)
                    assert min(of_sets) >= request.budget // 5
            else:
                assert set(of_sets) == {wanted[layer]}
        assert stats.kept_tokens[row] == pytest.approx(sum(wanted) / LAYERS)
        assert stats.evictions[row] == pytest.approx(length - sum(wanted) / LAYERS)


@every_policy
@few
@given(request=requests())
def test_memory_is_that_of_the_fullest_set_and_the_counts_are_those_of_the_schedule(
    name: str, request: Request
) -> None:
    config, decoder = request.config(name), request.decoder(name)
    stats = decoder.generate(request.prompts, request.new_tokens).stats
    assert decoder.cache is not None
    # Where a prompt was evicted, the buffer is made after it: in the first step, which has fed a token.
    evicted = any(
        length > budget for length in request.lengths for budget in budgets(config, request.budget, length)
    )
    fed = int(evicted and config is not None and config.evict_at == "first_step")
    slots, room = 0, max(request.new_tokens, config.draft if evicted and config is not None else 0)
    for row, length in enumerate(request.lengths):
        of_sets = budgets(config, request.budget, length)
        if name in ("adakv", "adakv_ea", "kvzip") and length > request.budget:
            of_sets = [len(state.kept) for state in states(decoder, row)]
        for budget in of_sets:
            slots = max(slots, min(budget + 1, min(budget, length + fed) + room + 1))
    of_slot = 2 * LAYERS * KV_HEADS * HEAD_DIM * FLOAT64 * len(request.prompts)
    assert stats.cache_bytes == bucket(slots) * of_slot
    assert decoder.cache.allocated_bytes == stats.cache_bytes

    steps = request.new_tokens - 1
    lazy = {"lazy2": 2, "lazy4": 4, "lazy8": 8, "lazy16": 16, "rehearsed": 16}
    once = ("score_free", "snapkv", "pyramidkv", "adakv", "adakv_ea", "kvzip")
    never = ("full", "streaming_llm")
    scored = 0 if name in never else 1 if name in once else math.ceil(steps / lazy.get(name, 1))
    assert stats.refreshes == scored


@every_kind
@few
@given(request=requests())
def test_a_row_of_a_batch_is_the_row_alone(name: str, request: Request) -> None:
    decoder = request.decoder(name, prefill_chunk=50)
    out = decoder.generate(request.prompts, request.new_tokens)
    for row, prompt in enumerate(request.prompts):
        alone = request.decoder(name)
        expected = alone.generate(prompt, request.new_tokens)
        assert out.tokens[row] == expected.tokens[0]
        assert_same_states(states(decoder, row), states(alone), TOLERANCE)
        for field in ("prompt_tokens", "budgets", "sequence_tokens", "kept_tokens", "evictions"):
            assert getattr(out.stats, field)[row] == getattr(expected.stats, field)[0]


@every_kind
@few
@given(request=requests(), other=requests())
def test_a_request_is_not_changed_by_the_one_before(name: str, request: Request, other: Request) -> None:
    fresh, used = request.decoder(name), request.decoder(name)
    expected = fresh.generate(request.prompts, request.new_tokens)
    used.generate(other.prompts, 3)
    used.extend([[1, 2, 3]] * len(other.prompts))
    used.decode(3)
    assert used.generate(request.prompts, request.new_tokens).tokens == expected.tokens
    for row in range(len(request.prompts)):
        assert_same_states(states(used, row), states(fresh, row))


@every_kind
@few
@given(request=requests(), after=st.integers(1, 5))
def test_a_saved_conversation_goes_on_exactly(
    name: str, request: Request, after: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.mktemp("saved") / "conversation"
    kept = request.decoder(name)
    kept.prefill(request.prompts)
    kept.decode(after)
    kept.save(path)
    loaded = request.decoder(name)
    loaded.load(path)
    turns = [random_prompt(5 + row, row) for row in range(len(request.prompts))]
    for decoder in (kept, loaded):
        decoder.decode(4)
        decoder.extend(turns)
    assert kept.decode(6).tokens == loaded.decode(6).tokens
    for row in range(len(request.prompts)):
        assert_same_states(states(kept, row), states(loaded, row))


@every_kind
@few
@given(request=requests())
def test_garbage_in_unused_slots_never_matters(name: str, request: Request) -> None:
    clean, spoilt = request.decoder(name), request.decoder(name)
    for decoder in (clean, spoilt):
        decoder.prefill(request.prompts)
    for _ in range(3):
        spoil_unused_slots(spoilt)
        assert clean.decode(2).tokens == spoilt.decode(2).tokens
    for row in range(len(request.prompts)):
        assert_same_states(states(clean, row), states(spoilt, row))


def test_random_scores_are_uniform_and_differ_by_seed_layer_query_and_position() -> None:
    """Watched from outside: with a budget of half of the prompt every half is as likely."""
    kept = []
    for seed in range(40):
        decoder = decoder_for(MODEL, policy("random", budget=30, scorer_seed=seed))
        decoder.generate(random_prompt(59), 2)
        kept.append(states(decoder)[0])
    sets = {tuple(state.kept) for state in kept}
    assert len(sets) == 40, "seeds differ"
    share = torch.zeros(60)
    for state in kept:
        share[state.kept] += 1 / 40
        assert state.utility_N.min() >= 0
        assert state.utility_N.max() < 1
        assert len(state.utility_N.unique()) == 30
    assert share.min() > 0.2
    assert share.max() < 0.8  # 3.8 standard deviations of a fair coin
    by_layer = decoder_for(
        MODEL, EvictionConfig(scorer="random", aggregation="single", scope="head", budget=30)
    )
    by_layer.generate(random_prompt(59), 2)
    assert len({tuple(state.kept) for state in states(by_layer)}) == LAYERS * KV_HEADS
