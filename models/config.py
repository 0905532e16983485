"""What a model is, as plain values."""

from dataclasses import dataclass

import torch

from .rope import RopeConfig

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool  # divide the chosen experts' shares by their sum
    sparse: tuple[bool, ...]  # a layer each: experts, or one dense MLP


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's arithmetic."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # a layer each: the sliding window, None for full attention
    moe: MoEConfig | None = None
    stored_dtype: torch.dtype | None = None  # the dtype that config.json names, if it does
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def position_limit(self) -> int | None:
        """The number of positions beyond which the arithmetic itself is wrong, None if there is none."""
        return self.max_positions if self.rope.type == "dynamic" else None


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """A dtype from its name, with or without `torch.` before it. Raises ValueError for any other dtype."""
    short = str(name).removeprefix("torch.")
    if short not in _DTYPES:
        raise ValueError(f"dtype {short!r} is not supported; supported: auto, {', '.join(_DTYPES)}")
    return _DTYPES[short]
