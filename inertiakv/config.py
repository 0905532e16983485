"""What to evict and when, as data: `EvictionConfig`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal, get_args, get_origin, get_type_hints

AttentionScorer = Literal["attention", "value_norm", "entropy", "above_mean"]
PromptScorer = Literal["expected_attention", "reconstruction"]
ScorerName = Literal[
    AttentionScorer, PromptScorer, "keydiff", "key_norm", "recency", "random", "learned", "none"
]
Aggregation = Literal["ema", "cumulative", "single"]
Coupling = Literal["layer_temporal", "temporal", "layer"]
Scope = Literal["shared", "layer", "head"]
Allocation = Literal["uniform", "pyramid", "adaptive", "model"]

DEFAULT_COMPRESSION = 0.9
DEFAULT_ALPHA = 0.8
SMALLEST_BUFFER = 127
"""Tokens that the smallest cache holds beside a new one: its slots come in blocks."""
MAX_BUDGET = 2**31 - 1
"""More tokens than any position can number: a budget that evicts nothing."""

MAX_SEED = 2**63 - 1

OF_ATTENTION: tuple[ScorerName, ...] = get_args(AttentionScorer)
"""Scorers that weigh a token by the attention paid to it. For the others no attention is computed beside the
one that makes the output."""

OF_SCORES = (
    *("aggregation", "alpha", "coupling", "step_alpha", "refresh", "new_token"),
    *("window", "window_by", "draft", "drafts", "pool", "pool_by", "pool_at", "rescue", "layers"),
)
"""Options that say what becomes of scores, and have no effect where nothing is scored."""
_OF_EMA = ("alpha", "step_alpha", "coupling")
_OF_PROMPT_EVICTION = ("evict_at", "window", "draft", "rescue", "reserve", "sinks", "allocation")


@dataclass(frozen=True)
class EvictionConfig:
    """An eviction rule. The defaults are the paper's: EMA 0.8, a refresh every step, 90 % evicted.

    Raises ValueError for a value out of range and for an option that the rest of the config would ignore.
    """

    compression: float | None = None
    """Share of the prompt's tokens to evict, in [0, 1): 0.9 keeps a tenth. 0.9 where no budget is given."""
    budget: int | None = None
    """Tokens kept in each row, whatever its prompt's length; instead of `compression`."""
    min_budget: int = 1
    """Tokens kept at least, where `compression` would leave fewer of a short prompt. Up to
    `SMALLEST_BUFFER` of them cost no memory."""
    scorer: ScorerName = "attention"
    """What a token is worth. `none` scores nothing: the oldest goes."""
    scorer_file: str | None = None
    """The weights of `learned`, a safetensors file."""
    scorer_seed: int | None = None
    """Of the scorer `random`; 0 by default."""
    scope: Scope = "shared"
    """What has a retention set of its own: all layers together, a layer, or a layer's KV head."""
    allocation: Allocation = "uniform"
    """How a row's budget is spread over its sets: alike, falling from the first layer to the last, among the
    heads of a layer as their utilities in the prompt compare, or so among all sets of the model. All sets
    have slots for the largest: uneven budgets free less memory, and `model` none where one set keeps
    everything."""
    layers: tuple[int, ...] | None = None
    """Layers that score, counted from 0, for the shared set; all by default."""
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
    new_token: Literal["zero", "mean"] = "zero"
    """Utility that a scored step's new token starts from: 0, or the mean of the others."""
    evict_at: Literal["first_step", "prompt"] = "first_step"
    """When the prompt is evicted to budget: in the first decode step, or before it."""
    after: Literal["rule", "recency", "none"] = "rule"
    """What is evicted while decoding, once the prompt was evicted before it: by the rule, the oldest,
    nothing."""
    window: int = 0
    """Last queries of the prompt that score together when it is evicted, beside the first decode step's
    own."""
    window_by: Literal["mean", "max"] = "mean"
    """What a token is worth to several queries that score together."""
    draft: int = 0
    """Tokens of a draft: what the answer would be were the prompt evicted by the first decode step's query
    alone. It is thrown away; its queries choose what stays of the prompt, together with the first. As long
    for a short answer as for a long one, so that the one is the beginning of the other."""
    drafts: int = 1
    """Drafts, each from what the one before it has chosen."""
    pool: int = 1
    """Positions, an odd number, over whose utilities each token's is pooled when the set is chosen, without
    those of protected tokens."""
    pool_by: Literal["max", "mean"] = "max"
    """The utility of a pool of positions."""
    pool_at: Literal["prompt", "always"] = "prompt"
    """Pool where the prompt is evicted, or at every eviction."""
    sinks: int = 0
    """Positions at the start of the sequence that are never evicted."""
    recent: int | float = 0
    """Newest positions that are never evicted: a number of them, or with a point a share of the budget."""
    reserve: float = 0.0
    """Share of the budget, in [0, 1), that is never evicted: in equal parts the first positions, the newest,
    and some spaced evenly over the prompt."""
    rescue: int = 0
    """Equal segments of the prompt that each keep at least their best token when it is evicted."""
    protect_prompt: bool = False
    """Never evict the prompt; the budget is for the tokens after it."""

    def __post_init__(self) -> None:
        self._check_values()
        self._check_effects()
        self._check_needs()
        layers_have_weights = self.step_alpha is None or (
            self.scope == "shared" and self.coupling != "temporal"
        )
        for name, used, default in (
            ("compression", self.budget is None, DEFAULT_COMPRESSION),
            ("alpha", self.scores and self.aggregation == "ema" and layers_have_weights, DEFAULT_ALPHA),
            ("scorer_seed", self.scorer == "random", 0),
        ):
            if used and getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.budget is not None:
            self._check_protection(self.budget)

    def _check_values(self) -> None:
        """Of single options."""
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.refresh != "once":
            check_int("refresh", self.refresh, 1, hint=" or 'once'")
        for name, least in _LEAST.items():
            if self._has(name):
                check_int(name, getattr(self, name), least)
        for name in ("compression", "alpha", "step_alpha", "reserve"):
            if self._has(name):
                _check_unit(name, getattr(self, name))
        if isinstance(self.recent, float):
            _check_unit("recent, as a share of the budget,", self.recent)
        else:
            check_int("recent", self.recent, 0)
        if self.pool % 2 == 0:
            raise ValueError(f"pool must be an odd number of positions, got {self.pool}")
        if self.scorer_seed is not None and self.scorer_seed > MAX_SEED:
            raise ValueError(f"scorer_seed must be at most {MAX_SEED}, got {self.scorer_seed}")
        if self.layers is not None:
            if not isinstance(self.layers, (tuple, list)):
                raise ValueError(f"layers must be a tuple of layers, got {self.layers!r}")
            for layer in self.layers:
                check_int("a layer that scores", layer, 0)
            if not self.layers or len(set(self.layers)) < len(self.layers):
                raise ValueError(f"layers must be different ones, at least one, got {self.layers}")
            object.__setattr__(self, "layers", tuple(sorted(self.layers)))
        if self.scorer_file is not None:
            if not isinstance(self.scorer_file, str | os.PathLike):
                raise ValueError(f"scorer_file must be a path, got {self.scorer_file!r}")
            object.__setattr__(self, "scorer_file", os.fspath(self.scorer_file))
        if not isinstance(self.protect_prompt, bool):
            raise ValueError(f"protect_prompt must be True or False, got {self.protect_prompt!r}")

    def _has(self, name: str) -> bool:
        """Whether an option has a value: only those that are None by default may have none."""
        return getattr(self, name) is not None or getattr(type(self), name) is not None

    def _check_effects(self) -> None:
        """Refuse options that others leave without effect."""
        scorer, after = f"scorer={self.scorer!r}", f"after={self.after!r}"
        unweighted = self.scope != "shared" or self.coupling == "temporal"
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self)}
        for holds, because, *without_effect in (
            (not self.scores, scorer, *OF_SCORES),
            (self.aggregation != "ema", f"aggregation={self.aggregation!r}", *_OF_EMA),
            (
                self.step_alpha is not None and unweighted,
                "step_alpha, where layers are not weighted",
                "alpha",
            ),
            (self.budget is not None, f"budget={self.budget}", "min_budget"),
            (self.scorer != "random", scorer, "scorer_seed"),
            (self.pool == 1, "pool=1", "pool_by", "pool_at"),
            (self.scope != "shared", f"scope={self.scope!r}", "layers", "coupling"),
            (self.protect_prompt, "protect_prompt=True", *_OF_PROMPT_EVICTION),
            (self.evict_at == "first_step", "evict_at='first_step'", "after"),
            (self.after != "rule", after, "refresh", "new_token", "pool_at"),
            (self.draft == 0, "draft=0 (give draft, 64 say)", "drafts"),
            (self.scorer not in (*OF_ATTENTION, "learned"), scorer, "draft"),
            (self.window == 0 and self.draft == 0, "a single query", "window_by"),
            (self.scorer != "attention", scorer, "window_by"),
            (self.evict_at == "prompt", "evict_at='prompt'", "draft"),
            (self.scorer == "reconstruction", f"{scorer}, which repeats the whole prompt", "window"),
        ):
            for name in without_effect if holds else ():
                if getattr(self, name) != defaults[name]:
                    raise ValueError(f"{name}={getattr(self, name)!r} has no effect with {because}")

    def _check_needs(self) -> None:
        """Refuse options without those that they need."""
        allocation, by_scores = f"allocation={self.allocation!r}", self.allocation in ("adaptive", "model")
        by_layer, shared = self.allocation in ("pyramid", "model"), self.scope == "shared"
        of_prompt, reconstructs = self.scorer in get_args(PromptScorer), self.scorer == "reconstruction"
        at_prompt, no_window = self.evict_at == "prompt", self.window == 0
        budgets, learned = (self.compression, self.budget), self.scorer == "learned"
        for wrong, what in (
            (None not in budgets, "give compression ({}) or budget ({}), not both".format(*budgets)),
            (learned != (self.scorer_file is not None), "scorer='learned' and scorer_file go together"),
            (by_layer and shared, f"{allocation} needs a set for each layer: scope='layer' or 'head'"),
            (
                self.allocation == "adaptive" and self.scope != "head",
                f"{allocation} needs a set for each head: scope='head'",
            ),
            (by_scores and not self.scores, f"{allocation} compares utilities, which scorer='none' has not"),
            (
                at_prompt and no_window and self.scores and not reconstructs,
                "evict_at='prompt' scores queries of the prompt: give window, 32 say",
            ),
            (reconstructs and not at_prompt, "scorer='reconstruction' needs evict_at='prompt'"),
            (
                of_prompt and not reconstructs and no_window,
                "scorer='expected_attention' needs queries of the prompt: give window, 512 say",
            ),
            (
                of_prompt and self.after == "rule" and self.refresh != "once",
                f"scorer={self.scorer!r} scores the prompt alone: give refresh='once'",
            ),
        ):
            if wrong:
                raise ValueError(what)

    @property
    def scores(self) -> bool:
        return self.scorer != "none"

    @property
    def scores_one_set(self) -> bool:
        """Whether it scores, for one retention set of all layers."""
        return self.scores and self.scope == "shared"

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """All of the rule that a graph of a decode step is made from. What is left out are numbers in
        buffers, or what happens before the first of these steps."""
        pooling = (self.pool, self.pool_by) if self.pool_at == "always" else None
        whole = (type(self), self.scorer, self.scorer_file, self.scope, self.layers)
        return (*whole, self.new_token, self.after, self.reserve > 0, pooling)

    def budget_for(self, prompt_tokens: int) -> int:
        """Tokens a row with this prompt keeps: floor((1 - compression) * prompt_tokens), at least
        `min_budget`; on average over its retention sets, and with `protect_prompt` beside the prompt.

        Exact in decimal: a compression of 0.9 keeps 100 of 1,000 tokens, not the 99 of binary floating point.
        Raises ValueError where what is protected alone exceeds it.
        """
        budget = self.budget if self.budget is None else min(self.budget, MAX_BUDGET)
        if budget is None:
            budget = max(self.min_budget, int((1 - Fraction(str(self.compression))) * prompt_tokens))
        self._check_protection(budget, f" of a prompt of {prompt_tokens} tokens")
        return min(prompt_tokens + budget, MAX_BUDGET) if self.protect_prompt else budget

    def protection_for(self, budget: int, prompt_tokens: int) -> tuple[int, int, int]:
        """How many positions of a row are protected: at the start, at the end, and spaced over the prompt."""
        if self.protect_prompt:
            budget -= prompt_tokens
        share = int(Fraction(str(self.reserve)) * budget)
        sinks = prompt_tokens if self.protect_prompt else self.sinks + share // 3
        recent = self.recent
        if isinstance(recent, float):
            recent = int(Fraction(str(recent)) * budget)
        return sinks, recent + share // 3, share - 2 * (share // 3)

    @property
    def goes_by_scores(self) -> bool:
        """Whether decode steps evict by scores, those of the step or former ones."""
        return self.scores and self.after == "rule"

    @property
    def refreshes(self) -> bool:
        """Whether decode steps after the first score."""
        return self.goes_by_scores and self.refresh != "once"

    def refreshes_at(self, step: int) -> bool:
        """Whether decode step `step` (counted from 1) scores."""
        if not self.goes_by_scores:
            return False
        if self.refresh == "once":
            return step == 1 and self.evict_at == "first_step"
        return (step - 1) % self.refresh == 0

    def _check_protection(self, budget: int, of: str = "") -> None:
        sinks, recent, spaced = self.protection_for(budget, 0)
        protected = {"sinks": sinks, "recent": recent, "reserve": spaced, "rescue": self.rescue}
        if sum(protected.values()) > budget:
            asked = " + ".join(f"{name} ({number})" for name, number in protected.items() if number)
            raise ValueError(f"{asked} protect more tokens than the budget of {budget} keeps{of}")


_CHOICES = {
    name: get_args(hint)
    for name, hint in get_type_hints(EvictionConfig).items()
    if get_origin(hint) is Literal
}
_LEAST = {
    **{"budget": 1, "min_budget": 1, "scorer_seed": 0, "window": 0, "draft": 0, "drafts": 1},
    **{"pool": 1, "sinks": 0, "rescue": 0},
}


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError for what is none of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")


def _check_unit(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), got {value!r}")


def check_int(name: str, value: object, least: int, hint: str = "") -> None:
    """Raise ValueError for what is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}{hint}, got {value!r}")
