"""The paper's negative results: alpha chosen from the scores, refreshes where ranks disagree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.tiny import (
    assert_same_state,
    conversation_state,
    decoder_for,
    random_prompt,
    random_prompts,
    tiny_model,
)
from inertiakv import EvictionConfig
from inertiakv.experimental import ALPHAS, AdaptiveAlpha, RankTrigger
from inertiakv.recording import Recording

MODEL = tiny_model(9)


def recording(score_TLN: torch.Tensor) -> Recording:
    steps, _, slots = score_TLN.shape
    position_TBN = torch.arange(slots, dtype=torch.int32).expand(steps, 1, -1)
    newest_TB = torch.full((steps, 1), slots - 1)
    return Recording(position_TBN, torch.zeros(steps, 1, slots), score_TLN[:, :, None], newest_TB)


@pytest.mark.parametrize("layers", [2, 30])
def test_the_alpha_that_balances_noise_and_lag(layers: int) -> None:
    """Layers that agree on a set that changes at every step want no smoothing; layers that disagree about a
    set that stays want all there is."""
    generator = torch.Generator().manual_seed(0)
    config = AdaptiveAlpha(coupling="temporal")
    moving_TLN = torch.rand(10, 1, 64, generator=generator).expand(-1, layers, -1)
    assert config.choose(recording(moving_TLN), 60) == 0.0
    noisy_TLN = torch.rand(1, layers, 64, generator=generator).expand(10, -1, -1)
    assert config.choose(recording(noisy_TLN), 60) == 0.95


def test_in_the_papers_recurrence_many_layers_leave_nothing_to_lag_behind() -> None:
    """A memory of alpha^30 is none: all that is left to weigh is the noise, and the largest alpha wins."""
    moving_TLN = torch.rand(10, 30, 64, generator=torch.Generator().manual_seed(0))
    assert AdaptiveAlpha().choose(recording(moving_TLN), 60) >= 0.9


def test_alpha_is_chosen_after_the_warm_up_of_each_conversation() -> None:
    decoder = decoder_for(MODEL, AdaptiveAlpha(budget=20, warm_up=4, coupling="temporal", alpha=0.31))
    assert decoder.aggregation is not None
    decoder.generate(random_prompt(50), 5, eos_token_ids=[])
    assert decoder.aggregation.alpha == 0.31
    expected = decoder_for(MODEL, EvictionConfig(budget=20, coupling="temporal", alpha=0.31))
    assert expected.generate(random_prompt(50), 5, eos_token_ids=[]).tokens
    assert_same_state(conversation_state(decoder), conversation_state(expected))
    for _ in range(2):
        decoder.generate(random_prompt(50), 12, eos_token_ids=[])
        assert decoder.aggregation.alpha in ALPHAS
        chosen = decoder.aggregation.alpha
        decoder.generate(random_prompt(50, seed=3), 2, eos_token_ids=[])
        assert decoder.aggregation.alpha == 0.31
    assert chosen != 0.31


def test_a_trigger_that_always_fires_is_the_rule_itself_and_one_that_never_does_scores_once() -> None:
    prompts = random_prompts((60, 33))
    base = EvictionConfig(budget=12, new_token="mean")
    always, once = base, dataclasses.replace(base, refresh="once", new_token="zero")
    for threshold, rule in ((0.0, always), (0.999, once)):
        trigger = RankTrigger(budget=12, new_token="mean", threshold=threshold)
        mine, theirs = decoder_for(MODEL, trigger), decoder_for(MODEL, rule)
        tokens = [decoder.generate(prompts, 30, eos_token_ids=[]).tokens for decoder in (mine, theirs)]
        if threshold:
            assert tokens[0] == tokens[1]
            for row in range(2):
                assert_same_state(conversation_state(mine, row), conversation_state(theirs, row))
        else:  # utilities that rank alike are put back, which later steps see
            assert mine.stats.kept_tokens == theirs.stats.kept_tokens


def test_a_trigger_is_between_the_two() -> None:
    kept = []
    for threshold in (0.0, 0.3, 0.999):
        decoder = decoder_for(MODEL, RankTrigger(budget=12, threshold=threshold))
        decoder.generate(random_prompt(60), 60, eos_token_ids=[])
        kept.append(conversation_state(decoder).kept)
    assert kept[0] != kept[1] != kept[2]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AdaptiveAlpha(budget=20, warm_up=4), RankTrigger(budget=20)])
def test_compiled_is_eager(rule: EvictionConfig) -> None:
    model = tiny_model(3, dtype=torch.float32)
    compiled, eager = (decoder_for(model, rule, compile=on) for on in (True, False))
    outs = [decoder.generate(random_prompt(60), 20, eos_token_ids=[]) for decoder in (compiled, eager)]
    assert outs[0].tokens == outs[1].tokens
    assert compiled.graphs.stats.compiled == 1


@pytest.mark.parametrize(
    "kind,options,match",
    [
        (AdaptiveAlpha, {"warm_up": 1}, "warm_up must be at least 2 steps, got 1"),
        (AdaptiveAlpha, {"aggregation": "single"}, "needs a rule that has an alpha, and refresh=1"),
        (AdaptiveAlpha, {"refresh": 4}, "needs a rule that has an alpha, and refresh=1"),
        (AdaptiveAlpha, {"scope": "head"}, "scope='shared'"),
        (AdaptiveAlpha, {"draft": 4}, "learns from the answer, and not from draft=4"),
        (AdaptiveAlpha, {"evict_at": "prompt", "window": 8, "after": "none"}, "which after='none' does not"),
        (RankTrigger, {"scorer": "none"}, "a rule that scores"),
        (RankTrigger, {"threshold": 1.0}, r"threshold must be in \[0, 1\), got 1.0"),
    ],
    ids=str,
)
def test_what_cannot_be(kind: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kind(**options)


def test_rows_of_a_batch_do_not_share_an_alpha() -> None:
    with pytest.raises(ValueError, match="2 prompts cannot share it"):
        decoder_for(MODEL, AdaptiveAlpha(budget=20)).generate(random_prompts((30, 40)), 2)


@pytest.mark.parametrize("layers", [(0,), (1, 0), (2,)])
def test_alpha_is_chosen_by_the_layers_that_score(layers: tuple[int, ...]) -> None:
    config = AdaptiveAlpha(layers=layers, coupling="temporal")
    score_TLN = torch.rand(10, 3, 64, generator=torch.Generator().manual_seed(0))
    scoring_TLN = score_TLN[:, sorted(layers)]
    score_TLN[:, [layer for layer in range(3) if layer not in layers]] = torch.nan
    alone = dataclasses.replace(config, layers=None)
    assert config.choose(recording(score_TLN), 60) == alone.choose(recording(scoring_TLN), 60)


def test_the_chosen_alpha_belongs_to_the_conversation(tmp_path: Path) -> None:
    rule = AdaptiveAlpha(budget=20, warm_up=4, coupling="temporal", alpha=0.31)
    decoder, other = decoder_for(MODEL, rule, record=9), decoder_for(MODEL, rule)
    assert decoder.aggregation is not None
    assert other.aggregation is not None
    decoder.generate(random_prompt(50), 15, eos_token_ids=[])
    assert len(decoder.recording().newest_TB) == 9
    chosen = decoder.aggregation.alpha
    assert chosen in ALPHAS
    with pytest.raises(ValueError, match="2 prompts cannot share it"):
        decoder.generate(random_prompts((30, 40)), 2)
    decoder.save(tmp_path / "conversation")
    other.load(tmp_path / "conversation")
    assert decoder.aggregation.alpha == other.aggregation.alpha == chosen
    for each in (decoder, other):
        each.extend(random_prompt(9, seed=1))
    tokens = [each.decode(20, eos_token_ids=[]).tokens for each in (decoder, other)]
    assert tokens[0] == tokens[1]
    assert decoder.aggregation.alpha == other.aggregation.alpha == chosen
    other.load(tmp_path / "conversation")
    other.generate(random_prompt(50), 2)
    assert other.aggregation.alpha == 0.31


def test_a_warm_up_that_is_cut_short_begins_anew(tmp_path: Path) -> None:
    """By a larger cache, whose slots are others, or by `load`."""
    rule = AdaptiveAlpha(budget=400, warm_up=4, coupling="temporal", alpha=0.31)
    decoder, other = decoder_for(MODEL, rule), decoder_for(MODEL, rule)
    decoder.prefill(random_prompt(122))
    decoder.decode(5, eos_token_ids=[])
    decoder.save(tmp_path / "conversation")
    other.load(tmp_path / "conversation")
    for each in (decoder, other):
        assert each.aggregation is not None
        each.decode(3, eos_token_ids=[])
        assert (each.aggregation.alpha, len(each.recording().newest_TB)) == (0.31, 3)
        each.decode(1, eos_token_ids=[])
        assert each.aggregation.alpha in ALPHAS
