"""The learned scorer: one bilinear form of query and key for the whole model, and its file.

`s[i] = (Wk k[i]) . (Wq q) / sqrt(64)` with q and k after RoPE, heads concatenated (arXiv 2609.03515).
`scripts/train_scorer.py` distils it from a model's own attention.

Shape letters: B batch, H query heads, G KV heads, N slots, D head dim, R rank of the form.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..compiling.numerics import accumulation_dtype
from ..model import Sizes

RANK = 64
"""Dimensions in which keys and queries meet."""


class LearnedScorer(nn.Module):
    """Scores keys by a query, one pair of matrices for all layers: `wk` [R, G*D] and `wq` [R, H*D].

    Initialised at random, so that a normalised key or query keeps its length: train it, or load one with
    `load_scorer`. Raises ValueError for sizes below 1.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        keys, queries = num_kv_heads * head_dim, num_heads * head_dim
        self.wk = nn.Parameter(torch.randn(RANK, keys, generator=generator) / math.sqrt(keys))
        self.wq = nn.Parameter(torch.randn(RANK, queries, generator=generator) / math.sqrt(queries))

    def direction(self, q_BHD: Tensor) -> Tensor:
        """The vector whose product with a key is its score, `wk^T wq q / sqrt(R)`, [B, G, D], float32 or
        wider.

        With it K is read once, in its own dtype. Raises ValueError for queries of another shape than this
        scorer's.
        """
        if q_BHD.shape[1:] != (self.num_heads, self.head_dim):
            raise ValueError(
                f"queries are [B, {self.num_heads}, {self.head_dim}] to this scorer, got {list(q_BHD.shape)}"
            )
        wide = accumulation_dtype(torch.promote_types(q_BHD.dtype, self.wq.dtype))
        query_BR = q_BHD.flatten(1).to(wide) @ self.wq.to(wide).T
        return (query_BR / math.sqrt(RANK) @ self.wk.to(wide)).unflatten(-1, (-1, self.head_dim))

    def score(self, q_BHD: Tensor, k_BGND: Tensor) -> Tensor:
        """Each token's score for the query of its row, [B, N], float32 or wider. Runs inside a graph.

        Only differences within a row mean something. Raises ValueError for shapes that are not this scorer's.
        """
        if (k_BGND.shape[1], k_BGND.shape[3]) != (self.num_kv_heads, self.head_dim):
            raise ValueError(
                f"keys are [B, {self.num_kv_heads}, N, {self.head_dim}] to this scorer, "
                f"got {list(k_BGND.shape)}"
            )
        direction_BGD = self.direction(q_BHD)
        wide = direction_BGD.dtype
        if torch.compiler.is_compiling():  # one loop of the compiler's own, which widens K as it reads it
            return (direction_BGD[:, :, None] * k_BGND.to(wide)).sum((1, 3))
        # Head by head: a copy of all K in float32 takes longer to be given memory than to be used.
        score_BN = direction_BGD.new_zeros(k_BGND.shape[0], k_BGND.shape[2])
        for direction_BD, k_BND in zip(direction_BGD.unbind(1), k_BGND.unbind(1), strict=True):
            score_BN += (k_BND.to(wide) @ direction_BD[..., None])[..., 0]
        return score_BN


def settings_path(path: str | Path) -> Path:
    """Where the settings of the scorer at `path` are: the same name, ending in .json. Raises ValueError where
    `path` does not end in .safetensors."""
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"a scorer's file ends in .safetensors, got {str(path)!r}")
    return Path(path).with_suffix(".json")


def save_scorer(path: str | Path, scorer: LearnedScorer, settings: dict[str, Any]) -> None:
    """Write `wk` and `wq` as safetensors, in the dtype that they have, and what made them as JSON beside
    them. Raises ValueError for a `path` that does not end in .safetensors."""
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    beside = settings_path(path)
    save_file({name: tensor.contiguous() for name, tensor in scorer.state_dict().items()}, path)
    beside.write_text(text + "\n", encoding="utf-8")


def check_file(path: str | Path) -> None:
    """Raise ValueError where there is no file of a scorer's weights."""
    if not Path(path).is_file():
        raise ValueError(f"no learned scorer at {path}; scripts/train_scorer.py makes one")


def load_scorer(
    path: str | Path,
    sizes: Sizes,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LearnedScorer:
    """Load the scorer at `path`, without gradients, for a model of these sizes (its `config`).

    Raises ValueError for a file that is missing, is no scorer, or was trained for other sizes.
    """
    check_file(path)
    scorer = LearnedScorer(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    expected = {name: list(tensor.shape) for name, tensor in scorer.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise ValueError(
            f"{path} does not fit {sizes.num_heads} query heads and {sizes.num_kv_heads} KV heads of "
            f"{sizes.head_dim}: expected {_shapes(expected)}, found {_shapes(found)}"
        )
    scorer.load_state_dict(tensors)
    return scorer.to(device, dtype).requires_grad_(False)


def _shapes(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items())) or "nothing"
