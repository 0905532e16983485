"""Eviction rules as data: what is accepted, what is refused, what the names mean."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inertiakv import POLICIES, EvictionConfig, policy


def test_the_defaults_are_the_papers() -> None:
    config = EvictionConfig()
    assert (config.aggregation, config.alpha, config.coupling) == ("ema", 0.8, "layer_temporal")
    assert (config.compression, config.budget, config.refresh) == (0.9, None, 1)
    assert (config.step_alpha, config.sinks, config.recent) == (None, 0, 0)


def test_a_config_cannot_be_changed_and_can_be_a_key() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EvictionConfig().alpha = 0.5
    assert len({EvictionConfig(), EvictionConfig(alpha=0.8), EvictionConfig(alpha=0.9)}) == 2


@pytest.mark.parametrize(
    "options,match",
    [
        ({"aggregation": "median"}, "unknown aggregation 'median'; choose from ema, cumulative, single"),
        ({"coupling": "both"}, "unknown coupling 'both'; choose from layer_temporal, temporal, layer"),
        ({"compression": 0.9, "budget": 10}, "not both"),
        ({"compression": 1.0}, r"compression must be a number in \[0, 1\), got 1.0"),
        ({"compression": -0.1}, "compression"),
        ({"compression": math.nan}, "compression"),
        ({"compression": "0.9"}, "compression"),
        ({"compression": True}, "compression"),
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": -5}, "budget"),
        ({"budget": 10.0}, "budget"),
        ({"budget": True}, "budget"),
        ({"alpha": 1.0}, r"alpha must be a number in \[0, 1\), got 1.0"),
        ({"alpha": -0.2}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
        ({"step_alpha": 1}, "step_alpha"),
        ({"step_alpha": -0.5}, "step_alpha"),
        ({"refresh": 0}, "refresh must be a whole number of at least 1 or 'once', got 0"),
        ({"refresh": 1.5}, "refresh"),
        ({"refresh": "twice"}, "refresh"),
        ({"refresh": True}, "refresh"),
        ({"scorer": "random", "scorer_seed": 2**63}, "scorer_seed must be at most"),
        ({"layers": 3}, "layers must be a tuple of layers, got 3"),
        ({"sinks": None}, "sinks must be a whole number of at least 0, got None"),
        ({"pool": None}, "pool must be a whole number of at least 1, got None"),
        ({"reserve": None}, r"reserve must be a number in \[0, 1\), got None"),
        ({"layers": [[0]]}, r"a layer that scores must be a whole number of at least 0, got \[0\]"),
        ({"protect_prompt": "no"}, "protect_prompt must be True or False, got 'no'"),
        ({"scorer": "learned", "scorer_file": 3}, "scorer_file must be a path, got 3"),
        ({"sinks": -1}, "sinks must be a whole number of at least 0, got -1"),
        ({"recent": -1}, "recent"),
        ({"recent": 2.0}, r"recent, as a share of the budget, must be a number in \[0, 1\), got 2.0"),
        ({"budget": 5, "sinks": 3, "recent": 3}, r"sinks \(3\) \+ recent \(3\) protect more tokens than"),
        ({"aggregation": "single", "alpha": 0.5}, "alpha=0.5 has no effect with aggregation='single'"),
        ({"aggregation": "cumulative", "alpha": 0.8}, "alpha=0.8 has no effect"),
        ({"aggregation": "single", "step_alpha": 0.5}, "step_alpha=0.5 has no effect"),
        (
            {"coupling": "temporal", "step_alpha": 0.5, "alpha": 0.3},
            "alpha=0.3 has no effect with step_alpha",
        ),
        ({"scope": "head", "step_alpha": 0.5, "alpha": 0.8}, "alpha=0.8 has no effect with step_alpha"),
        ({"aggregation": "cumulative", "coupling": "layer"}, "coupling='layer' has no effect"),
        ({"scorer": "loudness"}, "unknown scorer 'loudness'; choose from attention, value_norm"),
        ({"scope": "token"}, "unknown scope 'token'; choose from shared, layer, head"),
        ({"scorer": "learned"}, "scorer='learned' and scorer_file go together"),
        ({"scorer_file": "x"}, "scorer='learned' and scorer_file go together"),
        ({"scorer_seed": 3}, "scorer_seed=3 has no effect with scorer='attention'"),
        ({"scorer": "random", "scorer_seed": -1}, "scorer_seed must be a whole number of at least 0, got -1"),
        ({"scorer": "none", "alpha": 0.5}, "alpha=0.5 has no effect with scorer='none'"),
        ({"scorer": "none", "refresh": 4}, "refresh=4 has no effect with scorer='none'"),
        ({"scorer": "none", "pool": 5}, "pool=5 has no effect with scorer='none'"),
        ({"pool": 4}, "pool must be an odd number of positions, got 4"),
        ({"pool_by": "mean"}, "pool_by='mean' has no effect with pool=1"),
        ({"scope": "layer", "coupling": "layer"}, "coupling='layer' has no effect with scope='layer'"),
        ({"scope": "head", "layers": (1,)}, r"layers=\(1,\) has no effect with scope='head'"),
        ({"layers": ()}, "layers must be different ones, at least one"),
        ({"layers": (1, 1)}, "layers must be different ones"),
        ({"layers": (-1,)}, "a layer that scores must be a whole number of at least 0, got -1"),
        ({"allocation": "pyramid"}, "allocation='pyramid' needs a set for each layer"),
        ({"allocation": "model"}, "allocation='model' needs a set for each layer"),
        ({"allocation": "adaptive", "scope": "layer"}, "allocation='adaptive' needs a set for each head"),
        (
            {"allocation": "model", "scope": "head", "scorer": "none"},
            "allocation='model' compares utilities, which scorer='none' has not",
        ),
        ({"evict_at": "prompt"}, "evict_at='prompt' scores queries of the prompt: give window, 32 say"),
        ({"after": "none"}, "after='none' has no effect with evict_at='first_step'"),
        ({"evict_at": "prompt", "window": 8, "after": "none", "refresh": 4}, "refresh=4 has no effect"),
        ({"protect_prompt": True, "sinks": 4}, "sinks=4 has no effect with protect_prompt=True"),
        ({"draft": -1}, "draft must be a whole number of at least 0, got -1"),
        ({"draft": 4, "drafts": 0}, "drafts must be a whole number of at least 1, got 0"),
        ({"drafts": 2}, r"drafts=2 has no effect with draft=0 \(give draft, 64 say\)"),
        ({"draft": 4, "scorer": "keydiff"}, "draft=4 has no effect with scorer='keydiff'"),
        ({"draft": 4, "scorer": "none"}, "draft=4 has no effect with scorer='none'"),
        ({"draft": 4, "evict_at": "prompt", "window": 8}, "draft=4 has no effect with evict_at='prompt'"),
        ({"draft": 4, "protect_prompt": True}, "draft=4 has no effect with protect_prompt=True"),
        ({"window_by": "max"}, "window_by='max' has no effect with a single query"),
        ({"window": 4, "window_by": "max", "scorer": "value_norm"}, "window_by='max' has no effect with sco"),
        ({"window": 4, "window_by": "most"}, "unknown window_by 'most'; choose from mean, max"),
        ({"reserve": 1.0}, r"reserve must be a number in \[0, 1\), got 1.0"),
        ({"budget": 10, "rescue": 11}, r"rescue \(11\) protect more tokens than the budget of 10 keeps"),
        ({"budget": 10, "recent": 0.5, "sinks": 6}, r"sinks \(6\) \+ recent \(5\) protect more tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_or_would_be_ignored_is_an_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        EvictionConfig(**options)


@pytest.mark.parametrize(
    "compression,length,budget",
    [
        (0.9, 1000, 100),  # (1 - 0.9) * 1000 is 99.99999999999998 in binary
        (0.9, 1, 1),
        (0.7, 10, 3),
        (0, 17, 17),
        (1e-05, 100_000, 99_999),
    ],
)
def test_budgets_are_exact_in_decimal(compression: float, length: int, budget: int) -> None:
    assert EvictionConfig(compression=compression).budget_for(length) == budget


@given(st.integers(0, 999), st.integers(1, 200_000))
def test_budgets_are_the_floor_of_the_share_and_at_least_one(thousandths: int, length: int) -> None:
    budget = EvictionConfig(compression=thousandths / 1000).budget_for(length)
    assert budget == max(1, (1000 - thousandths) * length // 1000)


def test_an_absolute_budget_does_not_depend_on_the_prompt() -> None:
    config = EvictionConfig(budget=50)
    assert [config.budget_for(length) for length in (1, 50, 10_000)] == [50, 50, 50]
    assert config.compression is None


def test_a_prompt_too_short_for_what_is_protected_is_an_error() -> None:
    config = EvictionConfig(compression=0.9, sinks=4, recent=6)
    assert config.budget_for(100) == 10
    with pytest.raises(ValueError, match="protect more tokens than the budget of 9 keeps of a prompt of 99"):
        config.budget_for(99)


@pytest.mark.parametrize(
    "options,protection",
    [
        ({}, (0, 0, 0)),
        ({"sinks": 4, "recent": 6}, (4, 6, 0)),
        ({"recent": 0.5}, (0, 50, 0)),
        ({"recent": 0.29}, (0, 29, 0)),  # 0.29 * 100 is 28.999999999999996 in binary
        ({"reserve": 0.2}, (6, 6, 8)),
        ({"reserve": 0.2, "sinks": 4, "recent": 0.1}, (10, 16, 8)),
    ],
)
def test_what_is_protected_of_a_budget_of_a_hundred(
    options: dict[str, Any], protection: tuple[int, int, int]
) -> None:
    assert EvictionConfig(**options).protection_for(100, 1000) == protection


def test_a_protected_prompt_leaves_the_budget_to_the_answer() -> None:
    config = EvictionConfig(compression=0.9, protect_prompt=True)
    assert config.budget_for(1000) == 1100
    assert config.protection_for(1100, 1000) == (1000, 0, 0)


@pytest.mark.parametrize(
    "options,steps",
    [
        ({"refresh": 1}, [*range(1, 20)]),
        ({"refresh": 2}, [*range(1, 20, 2)]),
        ({"refresh": 4}, [1, 5, 9, 13, 17]),
        ({"refresh": "once"}, [1]),
        ({"scorer": "none"}, []),
        ({"evict_at": "prompt", "window": 8, "refresh": "once"}, []),
        ({"evict_at": "prompt", "window": 8, "refresh": 3}, [*range(1, 20, 3)]),
        ({"evict_at": "prompt", "window": 8, "after": "recency"}, []),
    ],
    ids=str,
)
def test_schedules(options: dict[str, Any], steps: list[int]) -> None:
    assert [step for step in range(1, 20) if EvictionConfig(**options).refreshes_at(step)] == steps


@pytest.mark.parametrize(
    "name,changes,expected",
    [
        ("full", {}, None),
        ("score_free", {}, EvictionConfig(refresh="once")),
        ("cumulative", {}, EvictionConfig(aggregation="cumulative")),
        ("lazy4", {"compression": 0.5}, EvictionConfig(refresh=4, compression=0.5)),
        ("lazy4", {"budget": 64}, EvictionConfig(refresh=4, budget=64)),
        ("lazy4", {"budget": None}, EvictionConfig(refresh=4)),
        ("lazy4", {"refresh": 2}, EvictionConfig(refresh=2)),
        ("inertiakv", {"alpha": 0.95, "sinks": 4}, EvictionConfig(alpha=0.95, sinks=4)),
        ("inertiakv", {"aggregation": "single"}, EvictionConfig(aggregation="single")),
        ("single", {"aggregation": "ema"}, EvictionConfig()),
        ("cumulative", {"aggregation": "ema", "alpha": 0.5}, EvictionConfig(alpha=0.5)),
        ("inertiakv", {"coupling": "temporal"}, EvictionConfig(coupling="temporal")),
        ("lazy4", {"scorer": "none"}, EvictionConfig(scorer="none")),
        ("random", {"scorer": "none"}, EvictionConfig(scorer="none")),
        ("lazy4", {"layers": [1, 0]}, EvictionConfig(refresh=4, layers=(0, 1))),
    ],
)
def test_policies_with_changes(name: str, changes: dict[str, Any], expected: EvictionConfig | None) -> None:
    assert policy(name, **changes) == expected


@pytest.mark.parametrize(
    "name,changes,match",
    [
        ("h3o", {}, "unknown policy 'h3o'; choose from full, inertiakv"),
        ("lazy4", {"temperature": 1}, "unknown option 'temperature'"),
        ("full", {"budget": 5}, "budget has no effect with policy 'full'"),
        ("full", {"compression": 0.5, "alpha": 0.3}, "compression, alpha has no effect"),
        ("lazy4", {"budget": 5, "compression": 0.5}, "not both"),
        ("cumulative", {"alpha": 0.5}, "alpha=0.5 has no effect"),
        ("single", {"step_alpha": 0.5}, "step_alpha=0.5 has no effect"),
        ("lazy4", {"budget": 2, "sinks": 3}, "protect more"),
    ],
)
def test_changes_that_cannot_be(name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        policy(name, **changes)


@pytest.mark.parametrize("after", ["recency", "none"])
@pytest.mark.parametrize(
    "name", [name for name, config in POLICIES.items() if config is not None and config.evict_at == "prompt"]
)
def test_rules_for_prompts_may_leave_the_answer_alone(name: str, after: str) -> None:
    config = policy(name, after=after)
    assert config is not None
    assert config.after == after
    assert not any(config.refreshes_at(step) for step in range(1, 20))
