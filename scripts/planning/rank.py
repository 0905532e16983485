"""One of several devices among which a model is split: heads, MLPs and vocabulary head, evenly."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from models import ModelConfig, Transformer
from models.layers import Linear
from models.quantize import make_room
from scripts.benchmarking import traffic


@dataclass(frozen=True)
class Rank:
    """A model as one rank holds it: on the meta device, with layers as much narrower as there are ranks."""

    model: Transformer
    ranks: int
    parameters: int
    """Numbers that it holds."""
    active: int
    """Weights that a token is multiplied with."""

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def weights(self) -> int:
        """Bytes that it holds."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def rank_of(config: ModelConfig, dtype: torch.dtype, quantize: str | None, ranks: int) -> Rank:
    """Embedding, norms and routers are whole on every rank. Raises ValueError for what cannot be split."""
    with torch.device("meta"):
        model = Transformer(split(config, ranks))
        if model.lm_head is not None:
            model.lm_head = Linear(config.hidden_size, -(-config.vocab_size // ranks))
        model.to(dtype)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        active = traffic.weight_bytes(model, 1) // dtype.itemsize
        if quantize is not None:
            make_room(model)
    return Rank(model, ranks, parameters, active)


def split(config: ModelConfig, ranks: int) -> ModelConfig:
    """The sizes of one rank. With fewer KV heads than ranks each of them is on several."""

    def part(size: int, what: str) -> int:
        if size % ranks:
            raise ValueError(f"{size:,} {what} cannot be split evenly over {ranks} ranks")
        return size // ranks

    heads, kv_heads, moe = part(config.num_heads, "query heads"), config.num_kv_heads, config.moe
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"{kv_heads} KV heads can neither be split over {ranks} ranks nor be on several each"
        )
    dense = moe is None or not all(moe.sparse)
    return dataclasses.replace(
        config,
        num_heads=heads,
        num_kv_heads=max(1, kv_heads // ranks),
        intermediate_size=part(config.intermediate_size, "MLP columns")
        if dense
        else config.intermediate_size,
        moe=moe and dataclasses.replace(moe, intermediate_size=part(moe.intermediate_size, "expert columns")),
    )
