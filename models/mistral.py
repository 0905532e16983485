"""Mistral: a sliding window on every layer if the config sets one (version 0.1; later ones say null)."""

from .family import Family, RawConfig, Windows, windows_by_layer


def windows(raw: RawConfig, num_layers: int) -> Windows:
    return windows_by_layer(raw, raw.get("sliding_window", 4096), [True] * num_layers)


FAMILY = Family("mistral", "MistralForCausalLM", windows=windows)
