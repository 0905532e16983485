"""Checks for tensor parallelism: rules that it supports, and agreement of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.retention import RetentionSets
from ..compiling.collectives import TensorParallel
from ..config import EvictionConfig, ScorerName

OF_ALL_HEADS: tuple[ScorerName, ...] = ("entropy", "learned", "reconstruction")
"""Scorers that are no mean of what single heads say."""


def check_rule(eviction: EvictionConfig | None, tp: TensorParallel) -> None:
    """Raise ValueError for a rule by which ranks, each with its own heads, would keep other tokens than one
    process with all heads."""
    if eviction is None or tp.size == 1:
        return
    rule = f"scorer={eviction.scorer!r}, scope={eviction.scope!r}"
    problem = None
    if eviction.scorer in OF_ALL_HEADS:
        problem = f"scorer={eviction.scorer!r} looks at all heads together"
    elif eviction.scorer == "expected_attention" and tp.kv_copies > 1:
        problem = f"{rule} takes the best token of a KV head, which {tp.kv_copies} ranks share"
    elif eviction.allocation in ("adaptive", "model"):
        problem = f"allocation={eviction.allocation!r} compares all heads"
    elif eviction.scope == "head" and tp.kv_copies > 1:
        problem = f"scope='head' has a set for each KV head, which {tp.kv_copies} ranks share"
    elif eviction.scope == "head" and eviction.scorer == "random":
        problem = f"{rule} numbers a layer's heads"
    if problem is not None:
        raise ValueError(f"{problem}: not with the model on {tp.size} ranks")


def check_agreement(tp: TensorParallel, token_B: Tensor, retention: Sequence[RetentionSets]) -> None:
    """Raise RuntimeError, on all ranks, if they have chosen different tokens, or kept different ones in
    sets that they share. For debugging: it waits for the device."""
    compared = {"tokens": token_B}
    for index, sets in enumerate(retention):
        compared |= {f"kept set {index}": sets.position_BXN, f"utilities {index}": sets.utility_BXN}
    mine = torch.cat([tensor.flatten().double() for tensor in compared.values()])
    of_ranks = tp.gather(mine).unflatten(0, (tp.size, -1))
    differ = (of_ranks != of_ranks[0]).split([tensor.numel() for tensor in compared.values()], dim=1)
    for name, differ_there in zip(compared, differ, strict=True):
        if others := differ_there.any(-1).nonzero()[:, 0].tolist():
            named = ", ".join(map(str, others))
            raise RuntimeError(f"ranks disagree: {name} of rank {named} differ from those of rank 0")
