"""Mistral: a sliding window on every layer, where the config has one (version 0.1; later ones say null)."""

from collections.abc import Mapping
from typing import Any

from .family import NO_ATTENTION_BIAS, Family, Windows, windows_by_layer


def _windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    window = raw.get("sliding_window", 4096)
    return windows_by_layer(raw, window, [True] * num_layers)


MISTRAL = Family("mistral", "MistralForCausalLM", accepts=NO_ATTENTION_BIAS, windows=_windows)
