"""What distinguishes one model family from another, read from its config.json.

To add a family: make a `Family` and add it to `FAMILIES`. The tests of models then cover it. If its
arithmetic has something that no field of `Family` describes, add the field here and to `ModelConfig`, and use
it in `layers.py`.
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


# Llama 2, 3.1, 3.2, 3.3 and models of the same architecture, such as SmolLM2: every default.
LLAMA = Family("llama", "LlamaForCausalLM", accepts={"sliding_window": ()})


def mistral_windows(raw: RawConfig, num_layers: int) -> Windows:
    """On every layer if the config sets one (version 0.1; later ones say null)."""
    return windows_by_layer(raw, raw.get("sliding_window", 4096), [True] * num_layers)


MISTRAL = Family("mistral", "MistralForCausalLM", windows=mistral_windows)


def qwen_windows(raw: RawConfig, num_layers: int) -> Windows:
    """Layers from `max_window_layers` on slide if `use_sliding_window` is set."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    first = raw.get("max_window_layers", 28)
    return windows_by_layer(raw, window, [index >= first for index in range(num_layers)])


# Qwen2 and Qwen2.5: biases on q, k and v.
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    accepts={"attention_bias": (False, True), "use_mrope": (False,)},
    qkv_bias=True,
    windows=qwen_windows,
)

# An RMSNorm on every query and key head before RoPE; no biases.
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, default_head_dim=128, windows=qwen_windows)


def qwen3_moe_windows(raw: RawConfig, num_layers: int) -> Windows:
    """Unlike Qwen2 and Qwen3, this family ignores `max_window_layers`: all layers slide or none does."""
    return qwen_windows({**raw, "max_window_layers": 0}, num_layers)


def qwen3_moe(raw: RawConfig, num_layers: int) -> MoEConfig | None:
    experts = raw.get("num_experts", raw.get("num_local_experts"))
    if experts is None:
        raise ValueError("a qwen3_moe config needs num_experts")
    if experts == 0:
        return None
    top_k, width = raw.get("num_experts_per_tok", 8), raw.get("moe_intermediate_size", 768)
    if not 1 <= top_k <= experts:
        raise ValueError(f"num_experts_per_tok {top_k} must be between 1 and num_experts {experts}")
    step = raw.get("decoder_sparse_step") or 1
    dense = set(raw.get("mlp_only_layers") or ())
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))
    return MoEConfig(experts, top_k, width, normalise=bool(raw.get("norm_topk_prob", False)), sparse=sparse)


# Qwen3's attention; a mixture of experts instead of the MLP in all or some layers.
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, windows=qwen3_moe_windows, moe=qwen3_moe)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)
