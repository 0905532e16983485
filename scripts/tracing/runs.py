"""Which rules are run, and one run of one rule over a prompt that is prefilled once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.config import MAX_BUDGET
from inertiakv.evals.diagnostics import RowTrace, cached_sets, row_trace
from inertiakv.eviction.protection import Limits
from inertiakv.scoring.learned import check_file

REFERENCE = "attention"
"""The scorer that the others are set against."""
LEAST_STEPS = 2
"""Fewer have no change between them."""


@dataclass(frozen=True)
class Rules:
    """What is asked for, by name. Scorers and variants are `inertiakv` with one thing changed."""

    policies: dict[str, EvictionConfig]
    variants: dict[str, EvictionConfig]
    scorers: dict[str, EvictionConfig]

    @property
    def labelled(self) -> dict[str, EvictionConfig]:
        """All of them by the names that they have in tables. Some may be the same rule."""
        return self.policies | self.variants | {f"scorer {name}": rule for name, rule in self.scorers.items()}

    @property
    def distinct(self) -> dict[str, EvictionConfig]:
        """The different ones beside the scorers; where there are none, the scorers."""
        labels: dict[EvictionConfig, str] = {}
        for label, rule in (self.policies | self.variants or self.labelled).items():
            labels.setdefault(rule, label)
        return {label: rule for rule, label in labels.items()}


def choose_rules(
    policies: Sequence[str],
    scorers: Sequence[str],
    couplings: Sequence[str],
    step_alphas: Sequence[float],
    kept: dict[str, Any],
    scorer_file: Path | None = None,
) -> Rules:
    """The rules by their names, with `compression` or `budget` as in `kept`. `scorer_file` is for the scorer
    `learned`. Raises ValueError for an unknown rule, for one that cannot be recorded, for none at all, and
    for a file that is missing or not needed."""
    if scorer_file is None and "learned" in scorers:
        raise ValueError("the scorer 'learned' needs its weights: give --scorer-file")
    if scorer_file is not None and "learned" not in scorers:
        raise ValueError("--scorer-file has no effect without 'learned' among --scorers")
    if scorer_file is not None:
        check_file(scorer_file)

    def rule(label: object, name: str, **changes: Any) -> EvictionConfig:
        config = policy(name, **kept, **changes)
        if config is None or not config.scores_one_set:
            raise ValueError(
                f"{label!r} cannot be traced: only rules that score, for one retention set of all layers, can"
            )
        return config

    file = {"learned": {"scorer_file": str(scorer_file)}}
    rules = Rules(
        {name: rule(name, name) for name in policies},
        {f"coupling {name}": rule(name, "inertiakv", coupling=name) for name in couplings}
        | {f"step_alpha {alpha:g}": rule(alpha, "inertiakv", step_alpha=alpha) for alpha in step_alphas},
        {
            name: rule(name, "inertiakv", scorer=name, **file.get(name, {}))
            for name in ([REFERENCE, *scorers] if scorers else [])
        },
    )
    if not rules.labelled:
        raise ValueError("no rule to trace: give --policies, --scorers, --couplings or --step-alphas")
    return rules


@dataclass(frozen=True)
class Run:
    """What one rule made of a prompt: the tokens of its answer, and the trace of the steps between them."""

    rule: EvictionConfig
    budget: int
    tokens: list[int]
    trace: RowTrace

    @property
    def cached_TP(self) -> torch.Tensor:
        """Of a run that evicts: what its cache held after each step."""
        return cached_sets(self.trace, self.budget)


def record(source: Decoder, rule: EvictionConfig, **how: Any) -> Run:
    """Decode `steps` steps, or to the answer's end, from the prompt that `source` has prefilled, in a cache
    that keeps every token, so that it can be seen what the rule would choose of all.

    `how`: `steps`, `eos_token_ids`, and options of the decoder. Raises ValueError where the answer is over
    too soon to see anything.
    """
    run = _decode(source, rule, replace(rule, compression=None, budget=MAX_BUDGET), **how)
    if run.trace.steps < LEAST_STEPS:
        raise ValueError(
            f"the answer to the prompt of {source.stats.prompt_tokens[0]:,} tokens is over after "
            f"{run.trace.steps} steps, and a change takes {LEAST_STEPS} (see --ignore-eos)"
        )
    return run


def record_evicting(source: Decoder, uncut: Run, **how: Any) -> Run:
    """The rule of a run that keeps every token, with its real budget. A first step that evicts the prompt is
    not recorded, but it saw what the first step of `uncut` saw."""
    run = _decode(source, uncut.rule, uncut.rule, **how)
    first = uncut.trace.first(1)
    if run.trace.steps < len(run.tokens) - 1:  # the last token is not fed
        run = replace(run, trace=first.then(run.trace) if run.trace.steps else first)
    return run


def _decode(
    source: Decoder,
    rule: EvictionConfig,
    config: EvictionConfig,
    *,
    steps: int,
    eos_token_ids: Sequence[int] | None = None,
    **options: Any,
) -> Run:
    decoder = Decoder(source.model, config, record=steps, **options)
    decoder.take_prompt(source, max_new_tokens=steps + 1)
    (length,) = decoder.stats.prompt_tokens
    budget = rule.budget_for(length)
    sinks, recent, spaced, prompt = (
        torch.tensor([number]) for number in (*rule.protection_for(budget, length), length)
    )
    (tokens,) = decoder.decode(steps + 1, eos_token_ids=eos_token_ids).tokens
    trace = row_trace(decoder.recording(), limits=Limits(sinks, recent, prompt, spaced))
    return Run(rule, budget, tokens, trace)


def same_steps(runs: Sequence[Run]) -> list[Run]:
    """The runs cut to the first steps, in which all of them fed the same tokens. Where none of them evicts
    that is all of them, but for rounding."""
    common = 0
    for tokens in zip(*(run.tokens[: run.trace.steps] for run in runs), strict=False):
        if len(set(tokens)) > 1:
            break
        common += 1
    return [replace(run, trace=run.trace.first(common)) for run in runs]
