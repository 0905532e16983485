"""Rotary position embedding: parameters from config.json, frequencies, rotation.

Shapes: B batch, T query tokens, H heads (query or KV), D head dim, R = D / 2 rotated pairs.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

# The keys that each RoPE type understands, in addition to those of every type.
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_TYPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate"},
}


@dataclass(frozen=True)
class RopeConfig:
    """RoPE of one model. Fields that its type does not use keep their defaults."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "RopeConfig":
        """Reads the RoPE part of a config.json: `rope_parameters`, which includes theta, or the older
        `rope_scaling` beside `rope_theta`. As in transformers `rope_scaling` counts where both are there, and
        an original length beside them counts more than the one within.

        Raises ValueError for a type, key or value that is not understood.
        """
        rope = _chosen(raw)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if not isinstance(kind, str) or kind not in _TYPE_KEYS:
            raise ValueError(f"RoPE type {kind!r} is not supported; supported: {', '.join(_TYPE_KEYS)}")
        for key, value in rope.items():
            if value is not None and key not in _COMMON_KEYS | _TYPE_KEYS[kind]:
                raise ValueError(
                    f"RoPE parameter {key!r} ({value!r}) is not understood for RoPE type {kind!r}"
                )
        _check_all_rotated(raw)
        _check_all_rotated(rope)

        def number(key: str, default: float | None = None) -> float:
            value = default if rope.get(key) is None else rope[key]
            if value is None or not _is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"RoPE type {kind!r} needs a positive number {key!r}, got {value!r}")
            return float(value)

        theta = number("rope_theta", _outer_theta(raw))
        if theta <= 1:
            raise ValueError(f"rope_theta must be above 1, got {theta}")
        if kind in ("default", "linear", "dynamic"):
            return cls(kind, theta, factor=1.0 if kind == "default" else number("factor"))

        limit, length = raw.get("max_position_embeddings"), "original_max_position_embeddings"
        if raw.get(length) is not None:
            rope[length] = raw[length]
        original = int(number(length, limit))
        if kind == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if high <= low:
                raise ValueError(f"RoPE high_freq_factor {high} must be above low_freq_factor {low}")
            return cls(kind, theta, number("factor"), original, low, high)

        factor = number("factor", limit / original if limit is not None and _is_number(limit) else None)
        return cls(
            kind,
            theta,
            factor,
            original,
            attention_factor=number("attention_factor", _yarn_attention_factor(factor, rope)),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(rope.get("truncate", True)),
        )


def _yarn_attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both = rope.get("mscale"), rope.get("mscale_all_dim")
    if all(both):
        if not all(map(_is_number, both)):
            raise ValueError(f"RoPE parameters mscale and mscale_all_dim must be numbers, got {both}")
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale(1.0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _outer_theta(raw: Mapping[str, Any]) -> Any:
    """Theta where the chosen dict has none."""
    return raw.get("rope_theta") or 10000.0


def _chosen(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Of `rope_parameters` and `rope_scaling` the one that counts, a copy. Raises ValueError where the other
    has a theta that would be lost: transformers loses it."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, Mapping):
            raise ValueError(f"{key} must be an object, got {raw[key]!r}")
    scaling, parameters = dict(raw.get("rope_scaling") or {}), dict(raw.get("rope_parameters") or {})
    if not scaling or not parameters:
        return scaling or parameters
    lost, theta = parameters.get("rope_theta"), scaling.get("rope_theta") or _outer_theta(raw)
    if lost is not None and lost != theta:
        raise ValueError(
            f"rope_scaling, which counts where both are there, goes with theta {theta}, and rope_parameters "
            f'has rope_theta {lost}: write one of them, or "rope_theta" into rope_scaling'
        )
    _check_all_rotated(parameters)
    ignored = parameters.get("rope_type") or parameters.get("type") or "default"
    if ignored != "default" and {**parameters, **scaling} != {**scaling, **parameters}:
        log.warning("rope_scaling is taken, not the rope_parameters of type %r beside it", ignored)
    return scaling


def _check_all_rotated(rope: Mapping[str, Any]) -> None:
    partial = rope.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported: every head dim is rotated")


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each rotated pair, float32 [R], computed in float64 and rounded once."""
    inv_freq_R = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if rope.type == "linear":
        inv_freq_R = inv_freq_R / rope.factor
    elif rope.type == "llama3":
        inv_freq_R = _llama3(rope, inv_freq_R)
    elif rope.type == "yarn":
        inv_freq_R = _yarn(rope, inv_freq_R, head_dim)
    # Dynamic NTK changes the base only beyond the trained length, where no sequence may go.
    return inv_freq_R.to(torch.float32)


def _llama3(rope: RopeConfig, inv_freq_R: Tensor) -> Tensor:
    # Pairs that turn rarely over the original length are stretched, others are kept, with a ramp between.
    turns_R = rope.original_max_positions * inv_freq_R / (2 * math.pi)
    keep_R = (turns_R - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep_R = keep_R.clamp(0, 1)
    return keep_R * inv_freq_R + (1 - keep_R) * inv_freq_R / rope.factor


def _yarn(rope: RopeConfig, inv_freq_R: Tensor, head_dim: int) -> Tensor:
    def pair_with(turns: float) -> float:
        length = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = (high - low) or 0.001
    stretch_R = ((torch.arange(head_dim // 2, dtype=torch.float64, device="cpu") - low) / span).clamp(0, 1)
    return stretch_R * inv_freq_R / rope.factor + (1 - stretch_R) * inv_freq_R


class Rotary(nn.Module):
    """cos and sin of every position, computed once in a forward pass for all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.attention_factor = rope.attention_factor
        self.inv_freq_R = inverse_frequencies(rope, head_dim)

    def _apply(self, fn: Any, recurse: bool = True) -> "Rotary":
        # Frequencies follow the model to its device but not to its dtype: in bfloat16 neighbouring positions
        # beyond 256 would have the same phase. A buffer could be cast, or left on the meta device.
        device = fn(torch.empty(0, device=self.inv_freq_R.device)).device
        if device.type != "meta":
            self.inv_freq_R = self.inv_freq_R.to(device)
        return self

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin, each [B, T, R] in `dtype` (float32 or float64). A padding position (-1) counts as 0."""
        phase_BTR = positions_BT.clamp(min=0).to(dtype)[..., None] * self.inv_freq_R.to(dtype)
        return phase_BTR.cos() * self.attention_factor, phase_BTR.sin() * self.attention_factor


def rotate(x_BHTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pair (i, i + R) of every head, in the dtype of cos and sin; the result has x's dtype."""
    cos_B1TR, sin_B1TR = rotary[0][:, None], rotary[1][:, None]
    a_BHTR, b_BHTR = x_BHTD.to(cos_B1TR.dtype).chunk(2, dim=-1)
    rotated = (a_BHTR * cos_B1TR - b_BHTR * sin_B1TR, b_BHTR * cos_B1TR + a_BHTR * sin_B1TR)
    return torch.cat(rotated, dim=-1).to(x_BHTD.dtype)
