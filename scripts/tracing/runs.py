"""Which rules are run, and one run of one rule over a prompt that is prefilled once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.config import MAX_BUDGET
from inertiakv.diagnostics import RowTrace, row_trace

REFERENCE = "attention"
"""The scorer that the others are set against."""
LEAST_STEPS = 2
"""Fewer have no change between them."""


@dataclass(frozen=True)
class Rules:
    """What is asked for. The scorers and couplings are those of `inertiakv`, everything else being equal."""

    policies: dict[str, EvictionConfig]
    scorers: dict[str, EvictionConfig]
    couplings: dict[str, EvictionConfig]

    @property
    def labelled(self) -> dict[str, EvictionConfig]:
        """All of them by the names that they have in tables. Some may be the same rule."""
        return {
            **self.policies,
            **{f"coupling {name}": config for name, config in self.couplings.items()},
            **{f"scorer {name}": config for name, config in self.scorers.items()},
        }

    @property
    def distinct(self) -> dict[str, EvictionConfig]:
        """The policies and couplings that differ; where there are none of them, the scorers."""
        labels: dict[EvictionConfig, str] = {}
        for label, rule in (replace(self, scorers={}).labelled or self.labelled).items():
            labels.setdefault(rule, label)
        return {label: rule for rule, label in labels.items()}


def choose_rules(
    policies: Sequence[str], scorers: Sequence[str], couplings: Sequence[str], kept: dict[str, Any]
) -> Rules:
    """The rules by their names, with `compression` or `budget` as in `kept`. Among scorers there always is
    the reference. Raises ValueError for an unknown rule, for one that evicts nothing, and for none at all."""
    for name in policies:
        if policy(name) is None:
            raise ValueError(f"policy {name!r} evicts nothing: there is nothing to trace")
    if scorers:
        scorers = list(dict.fromkeys([REFERENCE, *scorers]))
    rules = Rules(
        {name: _evicting(name, **kept) for name in policies},
        {name: _evicting("inertiakv", scorer=name, **kept) for name in scorers},
        {name: _evicting("inertiakv", coupling=name, **kept) for name in couplings},
    )
    if not rules.labelled:
        raise ValueError("no rule to trace: give --policies, --scorers or --couplings")
    return rules


def _evicting(name: str, **changes: Any) -> EvictionConfig:
    config = policy(name, **changes)
    assert config is not None
    return config


@dataclass(frozen=True)
class Run:
    """What one rule made of a prompt: the tokens of its answer, and the trace of the steps between them."""

    rule: EvictionConfig
    budget: int
    tokens: list[int]
    trace: RowTrace


def record(
    source: Decoder,
    rule: EvictionConfig,
    steps: int,
    eos: Sequence[int] | None,
    *,
    evict: bool,
    **options: Any,
) -> Run:
    """Decode `steps` steps, or to the answer's end, from the prompt that `source` has prefilled.

    Without `evict` the cache keeps every token, so that it can be seen what the rule would choose of all.
    `options` are the decoder's. Raises ValueError where the answer is over too soon to see anything.
    """
    config = rule if evict else replace(rule, compression=None, budget=MAX_BUDGET)
    decoder = Decoder(source.model, config, record=steps, **options)
    decoder.take_prompt(source)
    length = decoder.stats.prompt_tokens[0]
    budget = rule.budget_for(length)
    (tokens,) = decoder.decode(steps + 1, eos_token_ids=eos).tokens
    if not evict and len(tokens) <= LEAST_STEPS:  # of which the last one is not fed
        raise ValueError(
            f"the answer to the prompt of {length:,} tokens is over after {len(tokens) - 1} steps, and "
            f"a change takes {LEAST_STEPS} (see --ignore-eos)"
        )
    trace = row_trace(decoder.recording(), sinks=config.sinks, recent=config.recent)
    return Run(rule, budget, tokens, trace)


def same_steps(runs: Sequence[Run]) -> list[Run]:
    """The runs cut to the steps, from the first one on, in which all of them fed the same tokens. They do so
    throughout but for rounding, where none of them evicts."""
    fed = [run.tokens[: run.trace.steps] for run in runs]
    common = 0
    for tokens in zip(*fed, strict=False):
        if len(set(tokens)) > 1:
            break
        common += 1
    return [replace(run, trace=run.trace.first(common)) for run in runs]
