"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window on the upper layers if it is switched on."""

from .family import Family, RawConfig, Windows, windows_by_layer


def windows(raw: RawConfig, num_layers: int) -> Windows:
    """Layers from `max_window_layers` on slide if `use_sliding_window` is set."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    first = raw.get("max_window_layers", 28)
    return windows_by_layer(raw, window, [index >= first for index in range(num_layers)])


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    accepts={"attention_bias": (False, True), "use_mrope": (False,)},
    qkv_bias=True,
    windows=windows,
)
