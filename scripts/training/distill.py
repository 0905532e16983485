"""Distils the learned scorer from a model's own attention.

A step sends one text through the model, draws some queries from its second half, and in every layer compares
each query's scores with its target: the layer's attention, averaged over query heads, on the tokens up to the
query. The loss is the mean squared difference of scores and the target's logarithm, both less their mean,
since only differences decide, plus 0.1 times the KL divergence of the scores' softmax (temperature 1) from
the target. (Squared differences of the attention itself would be all about the few tokens that get nearly
everything, while eviction asks for the order of the others.)

Shape letters: C texts, T tokens of each, H query heads, G KV heads, D head dim, Q queries, N keys, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inertiakv.evals import diagnostics as dx
from inertiakv.models import Transformer
from inertiakv.scoring.learned import LearnedScorer
from inertiakv.scripts.cli.arguments import Count

KL_WEIGHT = 0.1
RATE_INPUTS = 512
"""The learning rate is that of a matrix with so many inputs. Adam moves every weight alike, and so moves the
outputs of a wider matrix further: its rate is as much lower."""
HELD_OUT = 8
"""Texts at most that are measured and not learned from; no more than a tenth of them."""
TOP = 10
"""The best of so many tokens are compared: those that a compression of 0.9 keeps."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How it learns: one piece of text a step, all layers of it."""

    steps: Count = 400
    queries: Count = 32
    """Queries of a piece, drawn at random, that are learned from."""
    lr: float = 0.005
    """Learning rate of AdamW at the start, for a matrix of 512 inputs, and as much less for a wider one. It
    falls to nothing along a cosine."""
    seed: int = 0
    """Of everything random."""

    def random(self, *what: int) -> torch.Generator:
        """A generator of its own for each thing that is drawn."""
        seed = 0
        for number in (self.seed, *what):
            seed = (seed * 1_000_003 + number) % 2**63
        return torch.Generator().manual_seed(seed)


def split(texts_CT: Tensor, recipe: TrainingOptions) -> tuple[Tensor, Tensor]:
    """The texts to learn from, and those that are held out. Raises ValueError for fewer than two."""
    count, length = texts_CT.shape
    if count < 2:
        raise ValueError(
            f"the text is enough for {count} pieces of {length} tokens, 2 are needed: one to learn from, one "
            "to measure by"
        )
    order_C = torch.randperm(count, generator=recipe.random(0))
    held_out = min(HELD_OUT, max(1, count // 10))
    return texts_CT[order_C[held_out:]], texts_CT[order_C[:held_out]]


def untrained(model: Transformer, recipe: TrainingOptions) -> LearnedScorer:
    """The scorer that training starts from."""
    sizes, random = model.config, recipe.random(1)
    scorer = LearnedScorer(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, generator=random)
    return scorer.to(model.device)


def train(
    model: Transformer, scorer: LearnedScorer, texts_CT: Tensor, recipe: TrainingOptions
) -> Iterator[float]:
    """Train the scorer with AdamW, whose rate falls to 0 along a cosine. Yields the loss of each step."""
    optimizer = torch.optim.AdamW([{"params": [matrix]} for matrix in scorer.parameters()])
    for step in range(recipe.steps):
        epoch, index = divmod(step, len(texts_CT))
        text = torch.randperm(len(texts_CT), generator=recipe.random(2, epoch))[index]
        fall = (1 + math.cos(math.pi * step / recipe.steps)) / 2
        for group in optimizer.param_groups:
            (matrix,) = group["params"]
            group["lr"] = recipe.lr * RATE_INPUTS / matrix.shape[1] * fall
        optimizer.zero_grad()
        losses: list[Tensor] = []

        def learn(q_QHD: Tensor, k_GND: Tensor, target_QN: Tensor, losses: list[Tensor] = losses) -> None:
            with torch.enable_grad():
                layer_loss = loss(scores(scorer, q_QHD, k_GND), target_QN) / model.config.num_layers
                layer_loss.backward()  # at once, so that no layer's scores are held
            losses.append(layer_loss.detach())

        observe(model, texts_CT[text], recipe.queries, recipe.random(3, step), learn)
        optimizer.step()
        yield torch.stack(losses).sum().item()


def measure(
    model: Transformer, scorer: LearnedScorer, texts_CT: Tensor, recipe: TrainingOptions
) -> dict[str, float]:
    """Spearman and Jaccard of scores with attention, means over queries and layers."""
    found: list[tuple[float, float]] = []

    def compare(q_QHD: Tensor, k_GND: Tensor, target_QN: Tensor) -> None:
        found.append(agreement(scores(scorer, q_QHD, k_GND), target_QN))

    for index, text_T in enumerate(texts_CT):
        observe(model, text_T, recipe.queries, recipe.random(4, index), compare)
    spearman, jaccard = (round(fmean(values), 4) for values in zip(*found, strict=True))
    return {"spearman": spearman, "jaccard": jaccard}


Observe = Callable[[Tensor, Tensor, int | None, float], None]
"""Called in each layer with q_BHTD, k_BGTD, the window and the scale."""


class ObservedPass:
    """In the place of a cache, for a text that goes through the model in one piece: keeps nothing, attends
    causally, and hands each layer's queries and keys, after RoPE, to `observe`."""

    def __init__(self, observe: Observe) -> None:
        self.observe = observe

    def run_layer(self, index: int, layer: Callable[..., Tensor], x_BTE: Tensor, *args: Any) -> Tensor:
        return layer(x_BTE, *args, self)

    def attend(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        self.observe(q_BHTD, k_BGTD, window, scale)
        tokens = q_BHTD.shape[2]
        options: dict[str, Any] = {"scale": scale, "enable_gqa": True}
        if window is None or window >= tokens:
            return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, **options)
        seen_TT = visible(torch.arange(tokens, device=q_BHTD.device), tokens, window)
        return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, attn_mask=seen_TT, **options)


def visible(position_Q: Tensor, keys: int, window: int | None) -> Tensor:
    """Bool [Q, N]: the keys 0..N-1 that queries at these positions see."""
    age_QN = position_Q[:, None] - torch.arange(keys, device=position_Q.device)
    return (age_QN >= 0) if window is None else (age_QN >= 0) & (age_QN < window)


def log_attention(
    q_QHD: Tensor, k_GND: Tensor, position_Q: Tensor, window: int | None, scale: float
) -> Tensor:
    """The logarithm of each query's attention, averaged over query heads, [Q, N]; -inf where it sees
    nothing."""
    wide = torch.promote_types(torch.float32, k_GND.dtype)
    q_GXD = q_QHD.to(wide).unflatten(1, (len(k_GND), -1)).permute(1, 2, 0, 3).flatten(1, 2)
    logits_HQN = (q_GXD @ k_GND.to(wide).mT * scale).flatten(0, 1).unflatten(0, (-1, len(position_Q)))
    seen_QN = visible(position_Q, k_GND.shape[1], window)
    log_HQN = logits_HQN.masked_fill(~seen_QN, -torch.inf).log_softmax(-1)
    return log_HQN.logsumexp(0) - torch.tensor(len(log_HQN), dtype=wide).log()


@torch.no_grad()
def observe(
    model: Transformer,
    text_T: Tensor,
    queries: int,
    random: torch.Generator,
    use: Callable[[Tensor, Tensor, Tensor], None],
) -> None:
    """Send a text through the model, and call `use(q_QHD, k_GND, target_QN)` in each layer, with the same
    queries."""
    length = len(text_T)
    position_Q = torch.randint(length // 2, length, (queries,), generator=random).to(model.device)

    def on_layer(q_BHTD: Tensor, k_BGTD: Tensor, window: int | None, scale: float) -> None:
        q_QHD = q_BHTD[0, :, position_Q].transpose(0, 1)
        use(q_QHD, k_BGTD[0], log_attention(q_QHD, k_BGTD[0], position_Q, window, scale))

    positions_1T = torch.arange(length, device=model.device)[None]
    model(text_T[None].to(model.device), positions_1T, ObservedPass(on_layer))


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
