"""Well-known models as shapes: their config.json, and weights made up on the spot."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inertiakv import memory
from models import Transformer, parse_config
from models.quantize import make_room

NOISE = 4_194_301
"""Random numbers that are made; larger tensors repeat them. A prime, so that no two rows are alike."""
SCALE = 0.02
INT8_SCALE = 32.0
"""What quantised weights have in place of it."""


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "head_dim": hidden // heads,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **more,
    }


def _qwen(kind: str, **more: Any) -> dict[str, Any]:
    return {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "model_type": kind, **more}


def _llama3_rope(factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"rope_parameters": scaling}


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(
        576, 1536, 30, 9, 3, 49152, rope_theta=1e5, max_position_embeddings=8192, tie_word_embeddings=True
    ),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, **_llama3_rope(32.0), tie_word_embeddings=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256, **_llama3_rope(8.0)),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64, 8, 128256, **_llama3_rope(8.0)),
    "mistral-7b-v0.3": {
        **_llama(4096, 14336, 32, 32, 8, 32768, rope_theta=1e6, max_position_embeddings=32768),
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
    },
    "qwen2.5-7b": _qwen(
        "qwen2",
        architectures=["Qwen2ForCausalLM"],
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=32768,
    ),
    "qwen3-8b": _qwen(
        "qwen3",
        architectures=["Qwen3ForCausalLM"],
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "qwen3-30b-a3b": _qwen(
        "qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    # For trying the program out, and for its tests.
    "tiny": _llama(64, 128, 2, 4, 2, 512, max_position_embeddings=512),
    "tiny-moe": _qwen(
        "qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        max_position_embeddings=512,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}


def shape(name: str, layers: int | None) -> dict[str, Any]:
    """The config.json of a shape, with another number of layers where one is given. ValueError for an unknown
    name."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; choose from {', '.join(SHAPES)}")
    return {**SHAPES[name], **({} if layers is None else {"num_hidden_layers": layers})}


@torch.no_grad()
def random_model(
    raw: dict[str, Any], dtype: torch.dtype, device: torch.device, quantize: str | None = None
) -> Transformer:
    """A model of a config.json with made-up weights, made where they stay. MemoryError where they do not
    fit."""
    with torch.device("meta"):
        model = Transformer(parse_config(raw)).to(dtype)
        if quantize is not None:
            make_room(model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memory.require({"weights": size}, device)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.randn(NOISE, generator=generator, device=device)
    weights = {dtype: (noise * SCALE).to(dtype), torch.int8: (noise * INT8_SCALE).clamp(-127, 127).char()}
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith(".scale"):
            parameter.fill_(SCALE / INT8_SCALE)
        else:
            for part in parameter.view(-1).split(NOISE):
                part.copy_(weights[parameter.dtype][: len(part)])
    return model


def without_position_limit(model: Transformer, positions: int) -> None:
    """Let a model take more positions than it has. Its answers mean nothing there, its speed does."""
    if model.config.max_positions < positions:
        model.config = dataclasses.replace(model.config, max_positions=positions)
