"""Checks of models and rules for InertiaCache, before any work is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..config import EvictionConfig
from ..scoring.learned import check_file

NAME = "inertiakv"
"""Of the attention function, as `attn_implementation`."""


def text_config(model: Any) -> Any:
    """The config of a model's decoder. Raises ValueError for what is no model of transformers."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers, which InertiaCache is for")
    return config.get_text_config(decoder=True)


def check_model(model: Any, config: Any) -> None:
    """Raise ValueError for a model whose attention is not ours to replace."""
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder and a decoder: InertiaCache is for decoders alone")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not use AttentionInterface, through which InertiaCache attends")
    check_implementation(config._attn_implementation)
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ValueError(f"{name} attends within chunks, which InertiaCache does not know")
    layers = DynamicCache(config=config).layers
    # Some versions make layers of other kinds as if they were attention.
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        known = kind in ("full_attention", "sliding_attention")
        if not known or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"layer {index} of {name} is no attention with K and V of its own")


def check_implementation(name: str | None) -> None:
    """Raise ValueError for an attention implementation under which the cache would not be asked for masks, or
    that is ours already, set by hand."""
    if name not in AttentionMaskInterface() or (type(name) is str and name == NAME):
        raise ValueError(f"InertiaCache cannot stand in for attn_implementation={name!r}: set 'sdpa', say")


def check_rule(eviction: object) -> EvictionConfig:
    """Raise ValueError for a rule that needs more than attention sees, or a file that is not there."""
    if type(eviction) is not EvictionConfig:
        raise ValueError(f"InertiaCache takes an EvictionConfig, as policy(name) gives it; got {eviction!r}")
    reasons = {
        "reconstruction": "gives the prompt to the model once more",
        "expected_attention": "undoes rotations, of which models of transformers have many kinds",
    }
    if eviction.scorer in reasons:
        raise ValueError(f"scorer={eviction.scorer!r} {reasons[eviction.scorer]}: use Decoder")
    if eviction.scorer_file is not None:
        check_file(eviction.scorer_file)
    if eviction.draft:
        raise ValueError(f"draft={eviction.draft} goes on with the model by itself: use Decoder")
    return eviction


def of_evicted_layers(
    eviction: EvictionConfig, evicted: list[int], windows: list[int | None]
) -> EvictionConfig:
    """The rule with the layers that score counted among those that are evicted."""
    for layer in eviction.layers or ():
        if layer not in evicted:
            kind = f"slides over {windows[layer]} tokens" if layer < len(windows) else "does not exist"
            raise ValueError(f"layer {layer} cannot score: it {kind}")
    if eviction.layers is None:
        return eviction
    return replace(eviction, layers=tuple(map(evicted.index, eviction.layers)))
