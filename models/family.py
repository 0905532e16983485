"""What distinguishes one model family from another, read from its config.json.

To add a family: write a file like `qwen3.py` that defines `FAMILY`, import it in `config.py` and add it to
`FAMILIES` there. The tests of models then cover it. If its arithmetic has something that no field of `Family`
describes, add the field here and to `ModelConfig`, and use it in `layers.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

RawConfig = Mapping[str, Any]
Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool  # divide the chosen experts' weights by their sum
    sparse: tuple[bool, ...]  # one entry a layer: experts, or one dense MLP


def windows_by_layer(raw: RawConfig, window: int | None, slides: list[bool]) -> Windows:
    """The sliding window of each layer, None for full attention. `layer_types` in the config says which
    layers slide; without it `slides` does."""
    types = raw.get("layer_types")
    if types is not None:
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"layer type {kind!r} is not supported; supported: full_attention, sliding_attention"
                )
        if len(types) != len(slides):
            raise ValueError(f"layer_types has {len(types)} entries for {len(slides)} layers")
        slides = [kind == "sliding_attention" for kind in types]
        if any(slides) and window is None:
            raise ValueError("layer_types has sliding_attention, but the config sets no sliding window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window {window!r}: expected a positive whole number")
    return tuple(window if slide else None for slide in slides)


def full_attention(raw: RawConfig, num_layers: int) -> Windows:
    return windows_by_layer(raw, None, [False] * num_layers)


def dense(raw: RawConfig, num_layers: int) -> MoEConfig | None:
    return None


@dataclass(frozen=True)
class Family:
    """`windows` and `moe` take the config and the number of layers."""

    model_type: str
    architecture: str
    accepts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Config keys that would change the arithmetic -> the values, beside null, that do not. `ACCEPTED` in
    config.py holds for all families; an entry here replaces one there."""
    qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None  # None: hidden size / heads
    windows: Callable[[RawConfig, int], Windows] = full_attention
    moe: Callable[[RawConfig, int], MoEConfig | None] = dense
