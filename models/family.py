"""What one family of models does differently from the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import MoEConfig

Windows = tuple[int | None, ...]

# Values that would change the arithmetic in ways no family here knows: key -> the values that change nothing.
_COMMON: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "quantization_config": (),
}
NO_ATTENTION_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}
NO_WINDOW: dict[str, tuple[Any, ...]] = {"sliding_window": ()}


def windows_by_layer(raw: Mapping[str, Any], window: int | None, slides: list[bool]) -> Windows:
    """One window a layer: where `layer_types` says so, or without it where `slides` does."""
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
            raise ValueError(
                "layer_types has sliding_attention, but the config gives no sliding window in use"
            )
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window {window!r}: expected a positive whole number")
    return tuple(window if slide else None for slide in slides)


def no_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    return windows_by_layer(raw, None, [False] * num_layers)


@dataclass(frozen=True)
class Family:
    model_type: str
    architecture: str
    accepts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None  # None: hidden size / heads
    windows: Callable[[Mapping[str, Any], int], Windows] = no_windows
    moe: Callable[[Mapping[str, Any], int], MoEConfig | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "accepts", {**_COMMON, **self.accepts})
