"""One decoder under one rule after the other: the answers of a new one, and graphs that are shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.tiny import VOCAB, assert_same_state, decoder_for, random_prompt, set_states, tiny_model
from inertiakv import POLICIES, Decoder, EvictionConfig, policy
from inertiakv.scoring.learned import LearnedScorer, save_scorer

PROMPTS = [random_prompt(110, 0), random_prompt(90, 1)]
ALIKE = [
    EvictionConfig(),
    EvictionConfig(refresh=4, alpha=0.3),
    EvictionConfig(refresh="once", budget=20),
    EvictionConfig(coupling="temporal", step_alpha=0.9),
    EvictionConfig(aggregation="cumulative", compression=0.5),
    EvictionConfig(aggregation="single", pool=5, rescue=2),
    EvictionConfig(evict_at="prompt", window=8, sinks=2, recent=0.25),
    EvictionConfig(protect_prompt=True, budget=3),
    EvictionConfig(draft=5, drafts=2, window_by="max"),
]
"""Rules whose decode steps are the same but for numbers."""
UNLIKE = [
    EvictionConfig(scorer="key_norm"),
    EvictionConfig(scope="layer"),
    EvictionConfig(new_token="mean"),
    EvictionConfig(layers=(0,)),
    EvictionConfig(reserve=0.5),
    EvictionConfig(pool=5, pool_at="always"),
    EvictionConfig(pool=7, pool_at="always"),
    EvictionConfig(evict_at="prompt", window=8, after="recency"),
]


def test_forms() -> None:
    assert len({rule.graph_key for rule in ALIKE}) == 1
    assert len({rule.graph_key for rule in [*ALIKE, *UNLIKE]}) == 1 + len(UNLIKE)


def random_order(seed: int) -> list[int]:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed)).tolist()


def answer(decoder: Decoder) -> tuple[list[list[int]], list[float], list[int | None]]:
    out = decoder.generate(PROMPTS, 12)
    return out.tokens, out.stats.kept_tokens, out.stats.budgets


def test_every_policy_after_every_other_answers_compiled_as_a_new_decoder_does_eagerly() -> None:
    """The same tokens and counts, and about the same cache, from a graph or two for each form of rule."""
    model = tiny_model(3, dtype=torch.float32)
    # No token twice: the first layer's keys of equal tokens have equal norms, which rounding tells apart.
    prompts = [random_order(length)[:length] for length in (60, 9, 52)]
    compiled = decoder_for(model, None, compile=True)
    for name in [*POLICIES, *reversed(POLICIES)]:
        rule = policy(name) if name == "full" else policy(name, budget=40)
        eager = decoder_for(model, rule)
        compiled.use(rule)
        assert compiled.eviction == rule
        expected, out = eager.generate(prompts, 14), compiled.generate(prompts, 14)
        assert out.tokens == expected.tokens, name
        for field in ("refreshes", "kept_tokens", "budgets"):
            assert getattr(out.stats, field) == getattr(expected.stats, field), name
        assert compiled.cache is not None
        assert eager.cache is not None
        for row in range(3):
            states = set_states(compiled.cache, row), set_states(eager.cache, row)
            for mine, theirs in zip(*states, strict=True):
                assert_same_state(mine, theirs, 1e-4)
    forms = {None if config is None else config.graph_key for config in POLICIES.values()}
    graphs = compiled.graphs.stats
    assert len(forms) <= graphs.compiled <= len(POLICIES)
    assert (graphs.breaks, graphs.recompiles) == (0, 0)


def test_rules_of_one_form_share_their_graphs() -> None:
    model = tiny_model(4, layers=2, dtype=torch.float32)
    decoder = decoder_for(model, ALIKE[0], compile=True)
    answer(decoder)
    decoder.use(ALIKE[2])
    answer(decoder)
    compiled = decoder.graphs.stats.compiled
    assert compiled == 2, "with scores and without"
    for rule in [*ALIKE, EvictionConfig(scorer="attention", alpha=0.6)]:
        decoder.use(rule)
        assert answer(decoder) == answer(decoder_for(model, rule)), rule
    assert (decoder.graphs.stats.compiled, decoder.graphs.stats.recompiles) == (compiled, 0)


@pytest.mark.parametrize("seed", [0, 5])
def test_the_seed_is_the_new_rules(seed: int) -> None:
    model = tiny_model(5, layers=2)
    rule = EvictionConfig(scorer="random", scorer_seed=seed, aggregation="single")
    decoder = decoder_for(model, EvictionConfig(scorer="random", scorer_seed=7, aggregation="single"))
    answer(decoder)
    decoder.use(rule)
    assert answer(decoder) == answer(decoder_for(model, rule))


def test_the_weights_of_a_scorer_are_read_again(tmp_path: Path) -> None:
    model, path = tiny_model(5, layers=2), tmp_path / "scorer.safetensors"
    rule = EvictionConfig(scorer="learned", scorer_file=str(path), budget=20)
    sizes = (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim)
    answers = []
    decoder = decoder_for(model, None)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        save_scorer(path, LearnedScorer(*sizes, generator=generator), {})
        decoder.use(rule)
        answers.append(answer(decoder))
        assert answers[-1] == answer(decoder_for(model, rule))
    assert answers[0] != answers[1]


def test_the_conversation_is_forgotten() -> None:
    decoder = decoder_for(tiny_model(7), EvictionConfig())
    decoder.generate(PROMPTS[0], 3)
    decoder.use(EvictionConfig(refresh=4))
    with pytest.raises(ValueError, match="no conversation yet"):
        decoder.decode(3)


def test_a_rule_that_cannot_be_leaves_everything_as_it_was() -> None:
    decoder = decoder_for(tiny_model(8, layers=2), EvictionConfig(), record=4)
    tokens = decoder.generate(PROMPTS[0], 5).tokens
    refused: list[tuple[Any, str]] = [
        (policy("h2o"), "record needs a rule that scores"),
        (None, "record needs a rule that scores"),
        (EvictionConfig(layers=(2,)), "layer 2 cannot score"),
        ("lazy4", "a rule is an EvictionConfig, as policy"),
        (EvictionConfig(scorer="learned", scorer_file="none"), "no learned scorer at none"),
    ]
    for rule, message in refused:
        with pytest.raises(ValueError, match=message):
            decoder.use(rule)
        assert decoder.eviction == EvictionConfig()
    more = decoder.decode(4).tokens
    again = decoder_for(tiny_model(8, layers=2), EvictionConfig())
    assert again.generate(PROMPTS[0], 9).tokens == [tokens[0] + more[0]]
