"""Distils the learned scorer from a model's own attention.

A step sends one text through the model, draws some queries from its second half, and in every layer compares
each query's scores with its target: the layer's attention, averaged over query heads, on the tokens up to the
query. The loss is the mean squared difference of scores and the target's logarithm, both less their mean,
since only differences decide, plus 0.1 times the KL divergence of the scores' softmax (temperature 1) from
the target. Squared differences of the weights themselves would be all about the few tokens that get nearly
everything: the order of the others, which is what eviction asks for, would count for nothing.

Shape letters: C texts, T tokens of each, H query heads, G KV heads, D head dim, Q queries, N keys.
"""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inertiakv.evals import diagnostics as dx
from inertiakv.models import Transformer
from inertiakv.scoring.learned import LearnedScorer
from inertiakv.scripts.training.attention import ObservedPass, log_attention

KL_WEIGHT = 0.1
RATE_INPUTS = 512
"""A matrix of so many inputs learns at the given rate. A step of Adam moves every weight alike, and so moves
what comes out of a wider matrix further: its rate is as much lower."""
HELD_OUT = 8
"""Texts at most that are measured and not learned from; no more than a tenth of them."""
TOP = 10
"""The best of so many tokens are compared: those that a compression of 0.9 keeps."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training gives, beside the model and the texts."""

    queries: int
    steps: int
    lr: float
    seed: int


class Distillation:
    """A training that can be broken off after any step, saved, and gone on with: the same numbers come out.

    All that is random in a step is drawn anew from the seed and the step's number.
    """

    def __init__(self, model: Transformer, texts_CT: Tensor, recipe: Recipe) -> None:
        """Raises ValueError for fewer than two texts: one is held out."""
        if len(texts_CT) < 2:
            raise ValueError(
                f"the text is enough for {len(texts_CT)} pieces of {texts_CT.shape[1]} tokens, 2 are needed: "
                "one to learn from, one to measure by"
            )
        self.model, self.recipe, self.step = model, recipe, 0
        order_C = torch.randperm(len(texts_CT), generator=self._random(0))
        held_out = min(HELD_OUT, max(1, len(texts_CT) // 10))
        self.held_out_CT, self.texts_CT = texts_CT[order_C[:held_out]], texts_CT[order_C[held_out:]]
        self.scorer = self.untrained()
        self.optimizer = torch.optim.AdamW([{"params": [matrix]} for matrix in self.scorer.parameters()])

    def untrained(self) -> LearnedScorer:
        """The scorer that training starts from."""
        sizes = self.model.config
        scorer = LearnedScorer(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, generator=self._random(1))
        return scorer.to(self.model.device)

    def train_step(self) -> float:
        """One step of AdamW, whose rate falls to nothing along a cosine; the loss before it."""
        epoch, index = divmod(self.step, len(self.texts_CT))
        text = torch.randperm(len(self.texts_CT), generator=self._random(2, epoch))[index]
        fall = (1 + math.cos(math.pi * self.step / self.recipe.steps)) / 2
        for group in self.optimizer.param_groups:
            (matrix,) = group["params"]
            group["lr"] = self.recipe.lr * RATE_INPUTS / matrix.shape[1] * fall
        self.optimizer.zero_grad()
        losses: list[Tensor] = []

        def learn(q_QHD: Tensor, k_GND: Tensor, target_QN: Tensor) -> None:
            with torch.enable_grad():
                layer_loss = loss(scores(self.scorer, q_QHD, k_GND), target_QN) / self.model.config.num_layers
                layer_loss.backward()  # at once, so that no layer's scores are held
            losses.append(layer_loss.detach())

        self._observe(self.texts_CT[text], self._random(3, self.step), learn)
        self.optimizer.step()
        self.step += 1
        return torch.stack(losses).sum().item()

    def measure(self, scorer: LearnedScorer) -> dict[str, Any]:
        """How a scorer orders the tokens of the texts that were held out: Spearman and Jaccard with attention, in
        all and by layer."""
        found: list[tuple[float, float]] = []

        def compare(q_QHD: Tensor, k_GND: Tensor, target_QN: Tensor) -> None:
            found.append(agreement(scores(scorer, q_QHD, k_GND), target_QN))

        for index, text_T in enumerate(self.held_out_CT):
            self._observe(text_T, self._random(4, index), compare)
        by_layer_L2 = torch.tensor(found, dtype=torch.float64).view(len(self.held_out_CT), -1, 2).mean(0)
        spearman, jaccard = ([round(x, 4) for x in column.tolist()] for column in by_layer_L2.unbind(-1))
        means = [round(x, 4) for x in by_layer_L2.mean(0).tolist()]
        return {
            "spearman": means[0],
            "jaccard": means[1],
            "spearman_by_layer": spearman,
            "jaccard_by_layer": jaccard,
        }

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Write everything that going on needs; what breaks this off leaves the file before."""
        state = {"scorer": self.scorer.state_dict(), "optimizer": self.optimizer.state_dict()}
        new = path.with_suffix(".new")
        torch.save({**state, "settings": settings, "step": self.step}, new)
        os.replace(new, path)

    def load(self, path: Path, settings: dict[str, Any]) -> None:
        """Go on where a training with the same settings was saved. Raises ValueError for other settings and
        for a file that is no checkpoint."""
        try:
            state = torch.load(path, map_location=self.model.device, weights_only=True)
            theirs, self.step = state["settings"], state["step"]
        except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no checkpoint of a training") from error
        for name, ours in settings.items():
            if theirs.get(name) != ours:
                what = f"{name} {theirs.get(name)!r}, not {ours!r}" if name != "text" else "another text"
                raise ValueError(f"{path} was made with {what}")
        self.scorer.load_state_dict(state["scorer"])
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def _observe(self, text_T: Tensor, random: torch.Generator, use: Any) -> None:
        """Send a text through the model; `use(q_QHD, k_GND, target_QN)` in each layer, the same queries."""
        tokens_1T = text_T[None].to(self.model.device)
        length = len(text_T)
        position_Q = torch.randint(length // 2, length, (self.recipe.queries,), generator=random)
        position_Q = position_Q.to(self.model.device)

        def observe(q_BHTD: Tensor, k_BGTD: Tensor, window: int | None, scale: float) -> None:
            q_QHD = q_BHTD[0, :, position_Q].transpose(0, 1)
            use(q_QHD, k_BGTD[0], log_attention(q_QHD, k_BGTD[0], position_Q, window, scale))

        positions_1T = torch.arange(length, device=self.model.device)[None]
        self.model(tokens_1T, positions_1T, ObservedPass(observe))

    def _random(self, *what: int) -> torch.Generator:
        """A generator of its own for each thing that is drawn."""
        seed = 0
        for number in (self.recipe.seed, *what):
            seed = (seed * 1_000_003 + number) % 2**63
        return torch.Generator().manual_seed(seed)


def scores(scorer: LearnedScorer, q_QHD: Tensor, k_GND: Tensor) -> Tensor:
    """Scores of the same keys for several queries, [Q, N]."""
    direction_QGD = scorer.direction(q_QHD)
    return direction_QGD.flatten(1) @ k_GND.to(direction_QGD.dtype).transpose(0, 1).flatten(1).T


def loss(score_QN: Tensor, target_QN: Tensor) -> Tensor:
    """MSE + 0.1 KL against the logarithm of attention, a scalar. Keys whose target is -inf are not seen."""
    seen_QN = target_QN > -torch.inf
    log_QN = score_QN.masked_fill(~seen_QN, -torch.inf).log_softmax(-1)
    gap_QN = torch.where(seen_QN, target_QN - log_QN, 0.0)
    count_Q1 = seen_QN.sum(-1, keepdim=True)
    centred_QN = torch.where(seen_QN, gap_QN - gap_QN.sum(-1, keepdim=True) / count_Q1, 0.0)
    mse_Q = centred_QN.square().sum(-1) / count_Q1[:, 0]
    kl_Q = (target_QN.exp() * gap_QN).sum(-1)
    return (mse_Q + KL_WEIGHT * kl_Q).mean()


def agreement(score_QN: Tensor, target_QN: Tensor) -> tuple[float, float]:
    """Spearman's rank correlation over the keys that each query sees, and Jaccard of the best tenth of them,
    means over queries."""
    seen_QN = target_QN > -torch.inf
    best_Q = (seen_QN.sum(-1) // TOP).clamp_min(1)
    ours_QN, theirs_QN = (dx.top_set(value_QN, seen_QN, best_Q) for value_QN in (score_QN, target_QN))
    correlation_Q = dx.spearman(score_QN, target_QN, seen_QN)
    return correlation_Q.mean().item(), dx.jaccard(ours_QN, theirs_QN).mean().item()
