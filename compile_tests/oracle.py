"""The method, written out: one sequence, float64, plain lists of positions, no batch, no slots, no graph.

Nothing here is shared with the implementation: the forward pass is its own, over the weights of a
`models.Transformer`, and the eviction rule is the paper's, word for word. Everything is keyed by position.

Shapes: H query heads, G KV heads, D head dim, E hidden size, R = D / 2 rotated pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from models import Transformer

Array = np.ndarray[Any, np.dtype[np.float64]]

NEAR = 1e-9
"""Utilities that differ by less than this share are told apart by rounding alone."""


@dataclass(frozen=True)
class Rule:
    """An eviction rule, in the words of the paper. `refresh` 0 scores once."""

    aggregation: str = "ema"
    alpha: float = 0.8
    coupling: str = "layer_temporal"
    step_alpha: float | None = None
    refresh: int = 1
    compression: float | None = 0.9
    budget: int | None = None
    sinks: int = 0
    recent: int = 0

    def options(self) -> dict[str, Any]:
        """The same rule as arguments of `EvictionConfig`."""
        names = ["aggregation", "compression", "budget", "sinks", "recent"]
        if self.aggregation == "ema":
            names += ["alpha", "coupling", "step_alpha"]
        return {name: getattr(self, name) for name in names} | {"refresh": self.refresh or "once"}

    def budget_for(self, prompt_tokens: int) -> int:
        if self.budget is not None:
            return self.budget
        return max(1, math.floor((1 - Decimal(str(self.compression))) * prompt_tokens))


@dataclass(frozen=True)
class Step:
    """What one decode step left behind. `unclear`: rounding alone decided which tokens went."""

    token: int
    utility: dict[int, float]
    refreshed: bool
    unclear: bool

    @property
    def kept(self) -> list[int]:
        return sorted(self.utility)


@dataclass
class Oracle:
    """A conversation. `rule` None keeps every token."""

    model: Transformer
    rule: Rule | None
    length: int = 0
    budget: int | None = None
    step: int = 0
    utility: dict[int, float] = field(default_factory=dict)
    k: list[dict[int, Array]] = field(default_factory=list)
    v: list[dict[int, Array]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = {name: p.double().numpy() for name, p in self.model.named_parameters()}
        config = self.model.config
        self.k = [{} for _ in range(config.num_layers)]
        self.v = [{} for _ in range(config.num_layers)]
        # A model's frequencies are float32 numbers, in whatever precision it runs.
        exponents_R = np.arange(0, config.head_dim, 2) / config.head_dim
        self.frequency_R = (config.rope.theta**-exponents_R).astype(np.float32).astype(np.float64)

    def prefill(self, prompt: list[int]) -> int:
        """Cache the whole prompt; the first token of the answer."""
        self.budget = None if self.rule is None else self.rule.budget_for(len(prompt))
        for token in prompt:
            logits, _ = self._forward(token)
        return int(logits.argmax())

    def extend(self, turn: list[int]) -> Step:
        """A further turn, which begins with the answer's last token: all of it attends over what was kept,
        its last token is the first step of a new schedule."""
        for token in turn[:-1]:
            self._forward(token)
        self.step = 0
        return self.decode(turn[-1])

    def decode(self, token: int) -> Step:
        """One decode step."""
        self.step += 1
        before = dict(self.utility)
        logits, scores = self._forward(token)
        refreshed = unclear = False
        if self.rule is not None:
            refreshed = self._refreshes(self.rule.refresh)
            new = max(self.utility)
            if refreshed:
                self._aggregate(self.rule, scores)
            else:
                self.utility[new] = sum(before.values()) / len(before)
            unclear = self._evict(self.rule, new)
        return Step(int(logits.argmax()), dict(self.utility), refreshed, unclear)

    def _refreshes(self, refresh: int) -> bool:
        return self.step == 1 if refresh == 0 else (self.step - 1) % refresh == 0

    def _aggregate(self, rule: Rule, scores: list[dict[int, float]]) -> None:
        recurrent = rule.coupling == "layer_temporal" and rule.step_alpha is None
        for i, old in self.utility.items():
            m, s = old, [score[i] for score in scores]
            if rule.aggregation == "single":
                for s_l in s:
                    m = s_l
            elif rule.aggregation == "cumulative":
                for s_l in s:
                    m = m + s_l
            elif recurrent:
                for s_l in s:
                    m = rule.alpha * m + (1 - rule.alpha) * s_l
            else:
                m = self._written_out(rule, old, s)
            self.utility[i] = m

    @staticmethod
    def _written_out(rule: Rule, old: float, s: list[float]) -> float:
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

    def _evict(self, rule: Rule, newest: int) -> bool:
        """Evict the lowest utilities until the budget is left, of equals the oldest; whether rounding
        decided."""
        assert self.budget is not None
        surplus = len(self.utility) - self.budget
        if surplus <= 0:
            return False
        candidates = [p for p in self.utility if p >= rule.sinks and p <= newest - rule.recent]
        candidates.sort(key=lambda p: (self.utility[p], p))
        unclear = False
        if surplus < len(candidates):
            worst_kept, best_gone = (self.utility[candidates[i]] for i in (surplus, surplus - 1))
            unclear = worst_kept != 0 and worst_kept - best_gone <= NEAR * abs(worst_kept)
        for position in candidates[:surplus]:
            for table in (self.utility, *self.k, *self.v):
                del table[position]
        return unclear

    def _forward(self, token: int) -> tuple[Array, list[dict[int, float]]]:
        """Feed the next token: its logits, and each layer's score of every cached token."""
        config, w, position = self.model.config, self.weights, self.length
        self.length += 1
        self.utility[position] = 0.0
        x_E = w["embed_tokens.weight"][token]
        scores = []
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}."
            h_E = self._norm(x_E, w[prefix + "input_layernorm.weight"])
            q_HD, k_GD, v_GD = (
                (w[f"{prefix}self_attn.{name}_proj.weight"] @ h_E).reshape(-1, config.head_dim)
                for name in "qkv"
            )
            self.k[layer][position] = self._rotate(k_GD, position)
            self.v[layer][position] = v_GD
            out_HD, score = self._attend(layer, self._rotate(q_HD, position), position)
            scores.append(score)
            x_E = x_E + w[prefix + "self_attn.o_proj.weight"] @ out_HD.reshape(-1)
            h_E = self._norm(x_E, w[prefix + "post_attention_layernorm.weight"])
            gate, up = (w[f"{prefix}mlp.{name}_proj.weight"] @ h_E for name in ("gate", "up"))
            x_E = x_E + w[prefix + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return w["lm_head.weight"] @ self._norm(x_E, w["norm.weight"]), scores

    def _attend(self, layer: int, q_HD: Array, position: int) -> tuple[Array, dict[int, float]]:
        config = self.model.config
        window, group = config.windows[layer], config.num_heads // config.num_kv_heads
        seen = [p for p in self.k[layer] if window is None or position - p < window]
        k_NGD = np.stack([self.k[layer][p] for p in seen])
        v_NGD = np.stack([self.v[layer][p] for p in seen])
        out_HD, total_N = np.zeros_like(q_HD), np.zeros(len(seen))
        for head in range(config.num_heads):
            logits_N = k_NGD[:, head // group] @ q_HD[head] / math.sqrt(config.head_dim)
            a_N = np.exp(logits_N - logits_N.max())
            a_N = a_N / a_N.sum()
            out_HD[head] = a_N @ v_NGD[:, head // group]
            total_N += a_N
        score = dict.fromkeys(self.k[layer], 0.0)
        score.update(zip(seen, (total_N / config.num_heads).tolist(), strict=True))
        return out_HD, score

    def _norm(self, x_E: Array, weight_E: Array) -> Array:
        return weight_E * x_E / np.sqrt((x_E**2).mean() + self.model.config.rms_norm_eps)

    def _rotate(self, x_ND: Array, position: int) -> Array:
        cos_R, sin_R = np.cos(position * self.frequency_R), np.sin(position * self.frequency_R)
        a_NR, b_NR = np.split(x_ND, 2, axis=-1)
        return np.concatenate((a_NR * cos_R - b_NR * sin_R, b_NR * cos_R + a_NR * sin_R), axis=-1)
