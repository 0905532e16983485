"""One decoder under one rule after the other: the answers of a new one, and graphs that are shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.tiny import VOCAB, assert_same_state, decoder_for, random_prompt, set_states, tiny_model
from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.attention.forward_state import ForwardState
from inertiakv.compiling.graphs import Graphs
from inertiakv.scoring.learned import LearnedScorer, save_scorer
from inertiakv.scoring.scorers import SCORERS, Evidence

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


CHAIN = ("full", "lazy4", "h2o", "tova", "snapkv", "streaming_llm", "lazy4", "single", "tova", "full", "h2o")
"""Policies of every scope, and of one form two and more."""


def test_policies_in_turn_answer_compiled_as_a_new_decoder_does_eagerly() -> None:
    """The same tokens and counts, and about the same cache, from one graph for each form of rule."""
    model = tiny_model(3, dtype=torch.float32)
    # No token twice: the first layer's keys of equal tokens have equal norms, which rounding tells apart.
    prompts = [random_order(length)[:length] for length in (60, 9, 52)]
    compiled = decoder_for(model, None, compile=True)
    for name in CHAIN:
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
    graphs = compiled.graphs.stats
    # Steps with the head's scope: those of snapkv, which no longer score, are no part of those that may.
    assert (graphs.compiled, graphs.breaks, graphs.recompiles) == (6, 0, 0)


UNCOMPILED = {"learned", "expected_attention"}
"""Scorers of test_learned.py, and of prompts."""


def scores(q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, weights_BGRN: Tensor, position_BXN: Tensor) -> Any:
    state = ForwardState(torch.tensor([[80], [60]]), None, "dense", (None,), position_BXN=position_BXN)
    evidence = Evidence(state, q_BHTD, k_BGND, v_BGND, 0.3, weights_BGRN, torch.tensor([7]))
    return [scorer(evidence) for name, scorer in SCORERS.items() if name not in UNCOMPILED]


@pytest.mark.parametrize("sets", [1, 2])
def test_scores_are_the_same_compiled(sets: int) -> None:
    """Of all scorers in one graph."""
    generator = torch.Generator().manual_seed(0)
    q_BHTD = torch.randn(2, 4, 1, 8, generator=generator)
    k_BGND, v_BGND = torch.randn(2, 2, 2, 50, 8, generator=generator)
    order_BXN = torch.rand(2, sets, 50, generator=generator).argsort(-1).int()
    position_BXN = torch.where(order_BXN < 40, order_BXN, -1)
    logits_BGRN = torch.randn(2, 2, 2, 50, generator=generator)
    weights_BGRN = logits_BGRN.masked_fill((position_BXN < 0)[:, :, None], -torch.inf).softmax(-1)
    args, graphs = (q_BHTD, k_BGND, v_BGND, weights_BGRN, position_BXN), Graphs(True, torch.device("cpu"))
    compiled = graphs.run(("scores", sets), scores, *args, capture=False)
    torch.testing.assert_close(compiled, scores(*args), rtol=1e-5, atol=1e-6)
    assert (graphs.stats.compiled, graphs.stats.breaks) == (1, 0)


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
