"""What an eviction rule says, written out for one sequence: scores, utilities, and which tokens stay.

Tokens are known by their position, and retention sets by (layer, KV head): (layer,) where the heads share
one, () where the layers do, too. Nothing here is shared with the implementation.

Shapes: G KV heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Key = tuple[int, ...]
Weights = dict[int, float]
"""Attention of one query head on the tokens that it sees."""
Draw = Callable[[int, int, int, list[int]], list[float]]
"""Random scores of a layer, a KV head and a query's position, for tokens at these positions."""

NEAR = 1e-9
"""Utilities that differ by less than this share are told apart by rounding alone."""


@dataclass(frozen=True)
class Rule:
    """An eviction rule, with the options of `EvictionConfig` and their meaning by its docstrings."""

    compression: float | None = None
    budget: int | None = None
    scorer: str = "attention"
    scorer_seed: int | None = None
    scope: str = "shared"
    allocation: str = "uniform"
    layers: tuple[int, ...] | None = None
    aggregation: str = "ema"
    alpha: float = 0.8
    coupling: str = "layer_temporal"
    step_alpha: float | None = None
    refresh: int | str = 1
    new_token: str = "zero"
    evict_at: str = "first_step"
    after: str = "rule"
    window: int = 0
    window_by: str = "mean"
    draft: int = 0
    drafts: int = 1
    pool: int = 1
    pool_by: str = "max"
    pool_at: str = "prompt"
    sinks: int = 0
    recent: int | float = 0
    reserve: float = 0.0
    rescue: int = 0
    protect_prompt: bool = False

    def options(self) -> dict[str, Any]:
        """The same rule as arguments of `EvictionConfig`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def budget_for(self, prompt: int) -> int:
        """Tokens kept; beside the prompt where that is protected."""
        if self.budget is not None:
            return self.budget
        return max(1, _part(1 - _exact(0.9 if self.compression is None else self.compression), prompt))

    def held_for(self, prompt: int) -> int:
        """Tokens kept in all."""
        return self.budget_for(prompt) + (prompt if self.protect_prompt else 0)

    def protection(self, prompt: int) -> tuple[int, int, int]:
        """Positions protected at the start, at the end, and spaced over the prompt."""
        budget = self.budget_for(prompt)
        share = _part(self.reserve, budget)
        recent = self.recent if isinstance(self.recent, int) else _part(self.recent, budget)
        sinks = prompt if self.protect_prompt else self.sinks
        return sinks + share // 3, recent + share // 3, share - 2 * (share // 3)

    def fits(self, prompt: int) -> bool:
        """Whether the budget is enough for what is protected."""
        return sum(self.protection(prompt)) + self.rescue <= self.held_for(prompt)

    def protected(self, prompt: int, newest: int) -> set[int]:
        sinks, recent, spaced = self.protection(prompt)
        parts = {math.ceil(Fraction(i * prompt, spaced)) for i in range(spaced)}
        return {*range(sinks), *range(newest - recent + 1, newest + 1), *(p for p in parts if p < prompt)}

    def key(self, layer: int, head: int) -> Key:
        return (layer, head)[: ("shared", "layer", "head").index(self.scope)]

    def refreshes_at(self, step: int) -> bool:
        if self.scorer == "none" or self.after != "rule":
            return False
        if self.refresh == "once":
            return step == 1 and self.evict_at == "first_step"
        return (step - 1) % int(self.refresh) == 0

    def budgets(self, prompt: int, layers: int, heads: int) -> dict[Key, int]:
        """A budget for each set. A pyramid falls in a line from twice the mean to a 20th of it, beside what
        is protected; where the whole prompt fits there is none."""
        fixed, budget = self.held_for(prompt), self.held_for(prompt)
        sums = [Fraction(0)] * (layers + 1)
        if self.allocation == "pyramid" and budget < prompt and layers > 1:
            fixed = sum(self.protection(prompt)) + self.rescue
            low = Fraction(budget - fixed, 20)
            # The first layer cannot hold more than the prompt; what it leaves goes to the last.
            high = min(2 * (budget - fixed) - low, Fraction(prompt - fixed))
            low = 2 * (budget - fixed) - high
            sums = [Fraction(0)]
            for layer in range(layers):
                sums.append(sums[-1] + high - (high - low) * Fraction(layer, layers - 1))
        whole = [round(total) for total in sums]
        return {
            self.key(layer, head): max(1, fixed + whole[layer + 1] - whole[layer])
            for layer in range(layers)
            for head in range(heads)
        }


def _exact(share: float | Decimal) -> Decimal:
    return Decimal(str(share))


def _part(share: float | Decimal, of: int) -> int:
    return math.floor(_exact(share) * of)


def head_scores(
    rule: Rule,
    layer: int,
    queries: Sequence[Sequence[Weights]],
    k: Sequence[dict[int, Array]],
    v: Sequence[dict[int, Array]],
    draw: Draw | None,
) -> list[Weights]:
    """Each KV head's score of its tokens. `queries`: the attention of every query head, for every query that
    scores; several score as if each had heads of its own."""
    newest = max(max(of_head) for of_head in k)
    group = len(queries[0]) // len(k)
    of_head = [[w for heads in queries for w in heads[g * group : (g + 1) * group]] for g in range(len(k))]
    entropy = [_entropy(w, len(k[g])) for g in range(len(k)) for w in of_head[g]]
    scores = []
    for g, (k_of, v_of) in enumerate(zip(k, v, strict=True)):
        positions = sorted(k_of)
        mean = {p: _mean([w.get(p, 0.0) for w in of_head[g]]) for p in positions}
        match rule.scorer:
            case "attention" if rule.window_by == "max":
                score = {p: _most(rule, queries, p, g, group) for p in positions}
            case "attention":
                score = mean
            case "value_norm":
                norm = {p: float(np.linalg.norm(v_of[p])) for p in positions}
                score = {p: mean[p] * norm[p] / _mean(norm.values()) for p in positions}
            case "entropy":
                score = {p: _mean(entropy) * mean[p] for p in positions}
            case "above_mean":
                above = 1 / len(positions)
                score = {p: _mean([float(w.get(p, 0.0) > above) for w in of_head[g]]) for p in positions}
            case "keydiff":
                unit = {p: k_of[p] / np.linalg.norm(k_of[p]) for p in positions}
                mean_D = np.mean([unit[p] for p in positions], axis=0)
                score = {p: -float(unit[p] @ mean_D / np.linalg.norm(mean_D)) for p in positions}
            case "key_norm":
                norm = {p: np.float32(np.linalg.norm(k_of[p])) for p in positions}
                score = {p: -float((n.view(np.int32) & -512).view(np.float32)) for p, n in norm.items()}
            case "recency":
                score = {p: float(p) for p in positions}
            case "random":
                assert draw is not None
                head = g if rule.scope == "head" else 0
                score = dict(zip(positions, draw(layer, head, newest, positions), strict=True))
            case _:
                raise ValueError(f"no scorer {rule.scorer}")
        scores.append(score)
    return scores


def _most(rule: Rule, queries: Sequence[Sequence[Weights]], p: int, g: int, group: int) -> float:
    """The most that any query pays to a token, in the mean over the query heads of its set."""
    own = slice(g * group, (g + 1) * group) if rule.scope == "head" else slice(None)
    return max(_mean(w.get(p, 0.0) for w in heads[own]) for heads in queries)


def _mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def _entropy(weights: Weights, number: int) -> float:
    """In parts of that of `number` equal weights."""
    return -sum(w * math.log(w) for w in weights.values() if w > 0) / math.log(number) if number > 1 else 0.0


def aggregated(rule: Rule, old: float, s: Sequence[float]) -> float:
    """A token's utility after its scores in the layers of its set, in turn."""
    m = old
    if rule.aggregation == "single":
        return s[-1]
    if rule.aggregation == "cumulative":
        for s_l in s:
            m = m + s_l
        return m
    if rule.scope != "shared":
        memory = rule.alpha if rule.step_alpha is None else rule.step_alpha
        (score,) = s
        return memory * old + (1 - memory) * score
    if rule.coupling == "layer_temporal" and rule.step_alpha is None:
        for s_l in s:
            m = rule.alpha * m + (1 - rule.alpha) * s_l
        return m
    return _written_out(rule, old, s)


def _written_out(rule: Rule, old: float, s: Sequence[float]) -> float:
    """An EMA over steps of a weighted mean over layers."""
    count = len(s)
    if rule.coupling == "temporal":
        weights, memory = [1.0] * count, rule.alpha
    else:
        weights = [rule.alpha ** (count - layer) for layer in range(1, count + 1)]
        memory = rule.alpha**count if rule.coupling == "layer_temporal" else 0.0
    if rule.step_alpha is not None:
        memory = rule.step_alpha
    mean = sum(w * s_l for w, s_l in zip(weights, s, strict=True)) / sum(weights)
    return memory * old + (1 - memory) * mean


class Rank(NamedTuple):
    """What decides about a token, most important first; `source` is the token whose utility this is."""

    protected: bool
    value: float
    position: int
    order: int = 0
    source: Any = None


class Choice(NamedTuple):
    """Tokens that stay, and those of which rounding alone decides whether they do."""

    kept: set[Any]
    unclear: set[Any]


def choose(ranks: Mapping[Any, Rank], budget: int, scale: float | None = None) -> Choice:
    """The best `budget` of these tokens. `scale`: the size of the numbers that utilities are sums of, where
    those may cancel."""
    order = sorted(ranks, key=lambda token: ranks[token][:4], reverse=True)
    kept, gone = order[:budget], order[budget:]
    if not kept or not gone or ranks[kept[-1]].protected != ranks[gone[0]].protected:
        return Choice(set(kept), set())
    worst, best = ranks[kept[-1]], ranks[gone[0]]
    near = NEAR * (max(abs(worst.value), abs(best.value)) if scale is None else scale)
    if worst.value - best.value > near:
        return Choice(set(kept), set())
    unclear = {
        token
        for token, rank in ranks.items()
        if rank.protected == worst.protected and abs(rank.value - worst.value) <= 2 * near
    }
    # Equal because all are 0 or copies of one utility: the age decides.
    values = {ranks[token].value for token in unclear}
    sources = {ranks[token].source for token in unclear}
    if values == {0.0} or (len(values) == len(sources) == 1 and None not in sources):
        return Choice(set(kept), set())
    return Choice(set(kept), unclear)


def pooled(rule: Rule, utility: Weights, protected: set[int]) -> dict[int, tuple[float, int | None]]:
    """Utilities to choose by: of each token's span, where the rule says so, with the token it comes from.
    What is protected stays anyhow, and is in no span."""
    spans: dict[int, tuple[float, int | None]] = dict.fromkeys(protected, (0.0, None))
    for position in utility.keys() - protected:
        near = [p for p in utility if abs(p - position) <= rule.pool // 2 and p not in protected]
        if rule.pool_by == "max":
            best = max(near, key=lambda p: utility[p])
            spans[position] = (utility[best], best)
        else:
            spans[position] = (_mean(utility[p] for p in near), None)
    return spans


def rescued(rule: Rule, utility: Weights, prompt: int, scale: float | None) -> Choice:
    """The best token in each of equal segments of the prompt."""
    kept: set[int] = set()
    unclear: set[int] = set()
    for segment in range(rule.rescue):
        inside = {p: Rank(False, m, p) for p, m in utility.items() if p < prompt}
        inside = {p: rank for p, rank in inside.items() if p * rule.rescue // prompt == segment}
        choice = choose(inside, 1, scale)
        kept |= choice.kept
        unclear |= choice.unclear
    return Choice(kept, unclear)
