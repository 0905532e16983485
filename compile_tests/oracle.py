"""The method, written out: one sequence, float64, plain dicts of positions, no batch, no slots, no graph.

Nothing here is shared with the implementation: the forward pass is its own, over the weights of a
`models.Transformer`, and the rules are those of `oracle_rules`. Everything is keyed by position, and by
retention set.

Shapes: H query heads, G KV heads, N tokens seen, D head dim, E hidden size, R = D / 2 rotated pairs.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from compile_tests.oracle_rules import (
    Array,
    Choice,
    Draw,
    Key,
    Rank,
    Rule,
    Weights,
    aggregated,
    choose,
    head_scores,
    pooled,
    rescued,
)
from inertiakv.models import Transformer

Arbiter = Callable[[Key], set[int]]
"""What another implementation keeps of a set: its word holds where rounding alone decides."""


@dataclass(frozen=True)
class Step:
    """What one decode step left behind. `unclear`: rounding alone decided which tokens went."""

    token: int
    refreshed: bool
    unclear: bool


@dataclass
class Oracle:
    """A conversation. `rule` None keeps every token."""

    model: Transformer
    rule: Rule | None
    draw: Draw | None = None
    length: int = 0
    prompt: int = 0
    step: int = 0
    budgets: dict[Key, int] = field(default_factory=dict)
    utility: dict[Key, dict[int, float]] = field(default_factory=dict)
    unclear: bool = False

    def __post_init__(self) -> None:
        self.weights = {name: p.double().numpy() for name, p in self.model.named_parameters()}
        config = self.model.config
        self.heads = [(i, g) for i in range(config.num_layers) for g in range(config.num_kv_heads)]
        self.utility = {self._key(*head): {} for head in self.heads}
        self.k: dict[Key, dict[int, Array]] = {head: {} for head in self.heads}
        self.v: dict[Key, dict[int, Array]] = {head: {} for head in self.heads}
        self.queries: list[list[list[Weights]]] = []  # of this turn, before its first step: by layer and head
        # A model's frequencies are float32 numbers, in whatever precision it runs.
        exponents_R = np.arange(0, config.head_dim, 2) / config.head_dim
        self.frequency_R = (config.rope.theta**-exponents_R).astype(np.float32).astype(np.float64)

    def kept(self, key: Key = ()) -> list[int]:
        return sorted(self.utility[key])

    @property
    def overfull(self) -> bool:
        return any(len(m) > self.budgets.get(key, len(m)) for key, m in self.utility.items())

    @property
    def evicts_prompt(self) -> bool:
        """Whether a prompt is evicted before the first decode step."""
        return self.rule is not None and self.rule.evict_at == "prompt"

    def prefill(self, prompt: list[int], arbiter: Arbiter | None = None) -> int:
        """Cache the whole prompt; the first token of the answer."""
        self.prompt = len(prompt)
        if self.rule is not None:
            config = self.model.config
            self.budgets = self.rule.budgets(len(prompt), config.num_layers, config.num_kv_heads)
        return self._read(prompt, arbiter)

    def extend(self, turn: list[int], arbiter: Arbiter | None = None) -> Step:
        """A further turn, which begins with what of the answer was not fed: all of it attends over what was
        kept. Its last token is the first step of a new schedule, unless it is evicted before that."""
        self.step = 0
        self.unclear = False
        if self.evicts_prompt:
            return Step(self._read(turn, arbiter), True, self.unclear)
        self._read(turn[:-1])
        return self.decode(turn[-1], arbiter)

    def _read(self, tokens: list[int], arbiter: Arbiter | None = None) -> int:
        """Cache a prompt or turn; the token that follows."""
        self.queries = []
        logits = np.zeros(1)
        for token in tokens:
            logits, attention = self._forward(token)
            self.queries.append(attention)
        if self.evicts_prompt:
            assert self.rule is not None
            if self.rule.scorer != "none":
                self._score(self.rule, self._window(self.rule))
            self._evict_prompt(self.rule, arbiter)
        return int(logits.argmax())

    def _window(self, rule: Rule) -> list[list[list[Weights]]]:
        return self.queries[-rule.window :] if rule.window else []

    def decode(self, token: int, arbiter: Arbiter | None = None) -> Step:
        """One decode step."""
        self.step += 1
        self.unclear = False
        before = {key: sum(m.values()) / max(1, len(m)) for key, m in self.utility.items()}
        overfull = self.overfull
        logits, attention = self._forward(token)
        refreshed, rule, first = False, self.rule, self.step == 1 and not self.evicts_prompt
        if rule is not None:
            refreshed = rule.refreshes_at(self.step)
            scores = rule.scorer != "none" and rule.after == "rule"
            if scores and (not refreshed or rule.new_token == "mean"):
                for key, m in self.utility.items():
                    m[self.length - 1] = before[key]
            if refreshed:
                queries = [*(self._window(rule) if first else []), attention]
                drafting = first and rule.draft > 0 and overfull
                self._score_ahead(rule, queries, self._draft(rule, queries, logits) if drafting else [])
            if first:
                self._evict_prompt(rule, arbiter)
            else:
                self._evict_one(rule, arbiter)
        return Step(int(logits.argmax()), refreshed, self.unclear)

    def _draft(self, rule: Rule, queries: list[list[list[Weights]]], logits: Array) -> list[int]:
        """The answer as it would be, had the prompt been evicted by these queries, and with more than one
        draft by those of the draft before."""
        draft: list[int] = []
        for _ in range(rule.drafts):
            sketch = self._copy()
            sketch._score_ahead(rule, queries, draft)
            sketch._evict_prompt(rule, None)
            self.unclear |= sketch.unclear
            sketch.rule = dataclasses.replace(rule, draft=0, drafts=1)
            draft = [int(logits.argmax())]
            while len(draft) < rule.draft and draft[-1] not in self.model.config.eos_token_ids:
                step = sketch.decode(draft[-1])
                self.unclear |= step.unclear
                draft.append(step.token)
        return draft

    def _copy(self) -> Oracle:
        """Another conversation that has come to the same point."""
        other = copy.copy(self)
        other.budgets = dict(self.budgets)
        for name in ("utility", "k", "v"):
            setattr(other, name, {key: dict(by_position) for key, by_position in getattr(self, name).items()})
        return other

    def _score_ahead(self, rule: Rule, queries: list[list[list[Weights]]], draft: list[int]) -> None:
        """Score with these queries and those of a draft, of which nothing is left afterwards."""
        ahead = self._copy()
        ahead._score(rule, [*queries, *(ahead._forward(token)[1] for token in draft)])
        for key, utility in self.utility.items():
            utility.update({position: ahead.utility[key][position] for position in utility})

    def _score(self, rule: Rule, queries: list[list[list[Weights]]]) -> None:
        config = self.model.config
        by_layer = []
        for layer in range(config.num_layers):
            k, v = ([kv[layer, g] for g in range(config.num_kv_heads)] for kv in (self.k, self.v))
            by_layer.append(head_scores(rule, layer, [q[layer] for q in queries], k, v, self.draw))
        for key, utility in self.utility.items():
            layers = [key[0]] if key else sorted(rule.layers or range(config.num_layers))
            for position, old in utility.items():
                scores = []
                for layer in layers:
                    heads = by_layer[layer] if len(key) < 2 else [by_layer[layer][key[1]]]
                    scores.append(sum(head[position] for head in heads) / len(heads))
                utility[position] = aggregated(rule, old, scores)

    def _evict_prompt(self, rule: Rule, arbiter: Arbiter | None) -> None:
        """Bring every set to its budget at once, after a prompt or turn."""
        protected = rule.protected(self.prompt, self.length - 1)
        ranks: dict[Key, dict[int, Rank]] = {}
        unclear = False
        for key, m in self.utility.items():
            saved = rescued(rule, m, self.prompt, _scale(rule))
            unclear |= bool(saved.unclear)
            ranks[key] = self._ranks(rule, key, protected, saved.kept, pool=True)
        if rule.allocation == "adaptive":
            self._evict_layers(rule, ranks, arbiter, unclear)
        else:
            for key in self.utility:
                self._evict([key], ranks, self.budgets[key], arbiter, unclear)
        if rule.after == "none":
            self.budgets = dict.fromkeys(self.budgets, 10**9)

    def _evict_layers(
        self, rule: Rule, ranks: dict[Key, dict[int, Rank]], arbiter: Arbiter | None, unclear: bool
    ) -> None:
        """A layer's heads share their budgets: a fifth evenly, the rest as each has of the best of all. None
        has fewer than are protected."""
        least = sum(rule.protection(self.prompt))
        for layer in range(self.model.config.num_layers):
            keys = [key for key in self.utility if key[0] == layer]
            total = sum(self.budgets[key] for key in keys)
            if sum(len(ranks[key]) for key in keys) <= total:
                continue
            together = {(key, p): rank for key in keys for p, rank in ranks[key].items()}
            for key in keys:
                choice = choose(ranks[key], least, _scale(rule))
                unclear |= bool(choice.unclear)
                for p in choice.kept:
                    together[key, p] = together[key, p]._replace(protected=True)
            best = choose(together, total, _scale(rule))
            unclear |= bool(best.unclear)
            end = Fraction(0)
            for key in keys:
                start = end
                own = sum(of == key for of, _ in best.kept)
                end += Fraction(4 * own, 5) + Fraction(total, 5 * len(keys))
                self.budgets[key] = math.floor(end + Fraction(1, 2)) - math.floor(start + Fraction(1, 2))
                if unclear and arbiter is not None:
                    self.budgets[key] = len(set(arbiter(key)))
                self._evict([key], ranks, self.budgets[key], arbiter, unclear)

    def _evict_one(self, rule: Rule, arbiter: Arbiter | None) -> None:
        if rule.after == "none":
            return
        protected = rule.protected(self.prompt, self.length - 1)
        for key in self.utility:
            ranks = self._ranks(rule, key, protected, set(), pool=rule.pool_at == "always")
            if rule.after == "recency":
                ranks = {p: rank._replace(value=0.0) for p, rank in ranks.items()}
            self._evict([key], {key: ranks}, self.budgets[key], arbiter)

    def _ranks(
        self, rule: Rule, key: Key, protected: set[int], saved: set[int], *, pool: bool
    ) -> dict[int, Rank]:
        utility, order = self.utility[key], -key[-1] if key else 0
        safe = protected | saved
        if not pool or rule.pool == 1:
            return {p: Rank(p in safe, m, p, order) for p, m in utility.items()}
        return {
            p: Rank(p in safe, m, p, order, None if source is None else (key, source))
            for p, (m, source) in pooled(rule, utility, protected & utility.keys()).items()
        }

    def _evict(
        self,
        keys: list[Key],
        ranks: dict[Key, dict[int, Rank]],
        budget: int,
        arbiter: Arbiter | None,
        unclear: bool = False,
    ) -> None:
        """Keep the best `budget` tokens of these sets together."""
        assert self.rule is not None
        everything = {(key, p): rank for key in keys for p, rank in ranks[key].items()}
        choice = choose(everything, budget, _scale(self.rule))
        if unclear and len(everything) > budget:
            choice = Choice(choice.kept, set(everything))
        kept = choice.kept
        if choice.unclear and arbiter is not None:
            theirs = {(key, p) for key in keys for p in arbiter(key)}
            adopted = (kept - choice.unclear) | (theirs & choice.unclear)
            kept = adopted if len(adopted) == len(kept) else kept
        elif choice.unclear:
            self.unclear = True
        for key, position in everything.keys() - kept:
            del self.utility[key][position]
            for head in self.heads:
                if self._key(*head) == key:
                    del self.k[head][position]
                    del self.v[head][position]

    def _key(self, layer: int, head: int) -> Key:
        return () if self.rule is None else self.rule.key(layer, head)

    def _forward(self, token: int) -> tuple[Array, list[list[Weights]]]:
        """Feed the next token: its logits, and each layer's attention, query head by query head."""
        config, w, position = self.model.config, self.weights, self.length
        self.length += 1
        for utility in self.utility.values():
            utility[position] = 0.0
        x_E = w["embed_tokens.weight"][token]
        attention = []
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}."
            h_E = self._norm(x_E, w[prefix + "input_layernorm.weight"])
            q_HD, k_GD, v_GD = (
                (w[f"{prefix}self_attn.{name}_proj.weight"] @ h_E).reshape(-1, config.head_dim)
                for name in "qkv"
            )
            for g, (k_D, v_D) in enumerate(zip(self._rotate(k_GD, position), v_GD, strict=True)):
                self.k[layer, g][position], self.v[layer, g][position] = k_D, v_D
            out_HD, weights = self._attend(layer, self._rotate(q_HD, position), position)
            attention.append(weights)
            x_E = x_E + w[prefix + "self_attn.o_proj.weight"] @ out_HD.reshape(-1)
            h_E = self._norm(x_E, w[prefix + "post_attention_layernorm.weight"])
            gate, up = (w[f"{prefix}mlp.{name}_proj.weight"] @ h_E for name in ("gate", "up"))
            x_E = x_E + w[prefix + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return w["lm_head.weight"] @ self._norm(x_E, w["norm.weight"]), attention

    def _attend(self, layer: int, q_HD: Array, position: int) -> tuple[Array, list[Weights]]:
        config = self.model.config
        window, group = config.windows[layer], config.num_heads // config.num_kv_heads
        out_HD, weights = np.zeros_like(q_HD), []
        for head in range(config.num_heads):
            k, v = self.k[layer, head // group], self.v[layer, head // group]
            seen = [p for p in k if window is None or position - p < window]
            logits_N = np.stack([k[p] for p in seen]) @ q_HD[head] / math.sqrt(config.head_dim)
            a_N = np.exp(logits_N - logits_N.max())
            a_N = a_N / a_N.sum()
            out_HD[head] = a_N @ np.stack([v[p] for p in seen])
            weights.append(dict(zip(seen, a_N.tolist(), strict=True)))
        return out_HD, weights

    def _norm(self, x_E: Array, weight_E: Array) -> Array:
        return weight_E * x_E / np.sqrt((x_E**2).mean() + self.model.config.rms_norm_eps)

    def _rotate(self, x_ND: Array, position: int) -> Array:
        cos_R, sin_R = np.cos(position * self.frequency_R), np.sin(position * self.frequency_R)
        a_NR, b_NR = np.split(x_ND, 2, axis=-1)
        return np.concatenate((a_NR * cos_R - b_NR * sin_R, b_NR * cos_R + a_NR * sin_R), axis=-1)


def _scale(rule: Rule) -> float | None:
    """Cosines of both signs add up to utilities near 0."""
    return 1.0 if rule.scorer == "keydiff" else None
