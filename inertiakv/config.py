"""What to evict and when, as data: `EvictionConfig`, and the named policies."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Aggregation = Literal["ema", "cumulative", "single"]
Coupling = Literal["layer_temporal", "temporal", "layer"]

DEFAULT_COMPRESSION = 0.9
DEFAULT_ALPHA = 0.8
MAX_BUDGET = 2**31 - 1
"""More tokens than any position can number: a budget that evicts nothing."""


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")


def _check_unit(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), got {value!r}")


def _check_int(name: str, value: object, least: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}{hint}, got {value!r}")


@dataclass(frozen=True)
class EvictionConfig:
    """An eviction rule. The defaults are the paper's: EMA 0.8, a refresh every step, 90 % evicted.

    Raises ValueError for a value out of range and for an option that the rest of the config would ignore.
    """

    compression: float | None = None
    """Share of the prompt's tokens to evict, in [0, 1): 0.9 keeps a tenth. 0.9 where no budget is given."""
    budget: int | None = None
    """Tokens kept in each row, whatever its prompt's length; instead of `compression`."""
    aggregation: Aggregation = "ema"
    """How scores are carried over layers and steps: a moving average, a sum, or not at all."""
    alpha: float | None = None
    """Smoothing of the EMA, in [0, 1): the share of the old utility that each update keeps. 0.8 by
    default."""
    coupling: Coupling = "layer_temporal"
    """What alpha smooths: layers and steps in one recurrence (the paper), steps alone, or layers alone."""
    step_alpha: float | None = None
    """Memory from step to step, in [0, 1), set by itself whatever the coupling would give."""
    refresh: int | Literal["once"] = 1
    """Score at every r-th decode step, or `once`: at the first one only."""
    sinks: int = 0
    """Positions at the start of the sequence that are never evicted."""
    recent: int = 0
    """Newest positions that are never evicted."""

    def __post_init__(self) -> None:
        _check_choice("aggregation", self.aggregation, ("ema", "cumulative", "single"))
        _check_choice("coupling", self.coupling, ("layer_temporal", "temporal", "layer"))
        self._resolve_budget()
        self._resolve_smoothing()
        if self.refresh != "once":
            _check_int("refresh", self.refresh, 1, hint=" or 'once'")
        _check_int("sinks", self.sinks, 0)
        _check_int("recent", self.recent, 0)
        if self.budget is not None and self.sinks + self.recent > self.budget:
            raise ValueError(self._overprotected(self.budget))

    def _resolve_budget(self) -> None:
        if self.budget is not None:
            if self.compression is not None:
                raise ValueError(f"give compression ({self.compression}) or budget ({self.budget}), not both")
            _check_int("budget", self.budget, 1)
        elif self.compression is None:
            object.__setattr__(self, "compression", DEFAULT_COMPRESSION)
        else:
            _check_unit("compression", self.compression)

    def _resolve_smoothing(self) -> None:
        if self.aggregation == "ema":
            if self.alpha is None:
                object.__setattr__(self, "alpha", DEFAULT_ALPHA)
            _check_unit("alpha", self.alpha)
            if self.step_alpha is not None:
                _check_unit("step_alpha", self.step_alpha)
            return
        for name, default in (("alpha", None), ("step_alpha", None), ("coupling", "layer_temporal")):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with aggregation={self.aggregation!r}"
                )

    def _overprotected(self, budget: int) -> str:
        asked = f"sinks ({self.sinks}) + recent ({self.recent})"
        return f"{asked} protect more tokens than the budget of {budget} keeps"

    def budget_for(self, prompt_tokens: int) -> int:
        """Tokens a row with this prompt keeps: floor((1 - compression) * prompt_tokens), at least 1.

        Exact in decimal: a compression of 0.9 keeps 100 of 1,000 tokens, not the 99 of binary floating point.
        Raises ValueError where sinks and recent alone exceed it.
        """
        budget = self.budget if self.budget is None else min(self.budget, MAX_BUDGET)
        if budget is None:
            budget = max(1, int((1 - Fraction(str(self.compression))) * prompt_tokens))
        if self.sinks + self.recent > budget:
            raise ValueError(f"{self._overprotected(budget)} of a prompt of {prompt_tokens} tokens")
        return budget

    def refreshes_at(self, step: int) -> bool:
        """Whether decode step `step` (counted from 1) scores. The first always does."""
        return step == 1 if self.refresh == "once" else (step - 1) % self.refresh == 0


POLICIES: dict[str, EvictionConfig | None] = {
    "full": None,
    "inertiakv": EvictionConfig(),
    "lazy4": EvictionConfig(refresh=4),
    "score_free": EvictionConfig(refresh="once"),
    "cumulative": EvictionConfig(aggregation="cumulative"),
    "single": EvictionConfig(aggregation="single"),
}
"""The named policies. `None`, the full cache, keeps every token."""


def policy(name: str, **changes: object) -> EvictionConfig | None:
    """The named policy, with fields of its config replaced; None is the full cache.

    `budget=` takes the place of the policy's compression. Raises ValueError for an unknown name or field, and
    for any change to `full`, which has nothing to configure.
    """
    _check_choice("policy", name, tuple(POLICIES))
    base = POLICIES[name]
    fields = {field.name for field in dataclasses.fields(EvictionConfig)}
    for change in changes:
        _check_choice("option", change, tuple(sorted(fields)))
    if base is None:
        if changes:
            raise ValueError(f"{', '.join(changes)} has no effect with policy 'full', which evicts nothing")
        return None
    if changes.get("budget") is not None:
        changes.setdefault("compression", None)
    if changes.get("aggregation", base.aggregation) != "ema":
        changes.setdefault("alpha", None)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]
