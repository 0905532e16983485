"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window on the upper layers, where it is switched on."""

from collections.abc import Mapping
from typing import Any

from .family import Family, Windows, windows_by_layer


def upper_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Layers from `max_window_layers` on slide, if `use_sliding_window`."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    first = raw.get("max_window_layers", 28)
    return windows_by_layer(raw, window, [index >= first for index in range(num_layers)])


QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", accepts={"use_mrope": (False,)}, qkv_bias=True, windows=upper_windows
)
