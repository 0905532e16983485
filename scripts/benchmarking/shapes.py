"""Well-known models as shapes: their config.json, and weights made up on the spot."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inertiakv.cache import memory
from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.models import Transformer, parse_config
from inertiakv.models.quantize import make_room

NOISE = 4_194_301
"""Random numbers that are made; larger tensors repeat them. A prime, so that no two rows are alike."""
SCALE = 0.02
INT8_SCALE = 32.0
"""What quantised weights have in place of it."""


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


def _llama3(*sizes: int, factor: float = 8.0, **more: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    ids = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
    plain = {"attention_bias": False, "mlp_bias": False, "rope_theta": 500000.0}
    hidden, intermediate, layers, heads, kv_heads = sizes
    return _llama(
        hidden, intermediate, layers, heads, kv_heads, 128256, **plain, **ids, rope_scaling=scaling, **more
    )


def _qwen(kind: str, architecture: str, *sizes: int, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_act": "silu",
        **dict(zip((*names, "num_key_value_heads", "vocab_size"), sizes, strict=True)),
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        **more,
    }


def _qwen25(*sizes: int, **more: Any) -> dict[str, Any]:
    lengths = {"max_position_embeddings": 32768, "sliding_window": 131072}
    return _qwen("qwen2", "Qwen2ForCausalLM", *sizes, 152064, **lengths, **more)


def _qwen3(kind: str, architecture: str, *sizes: int, **more: Any) -> dict[str, Any]:
    heads = {"attention_bias": False, "head_dim": 128, "rope_scaling": None, "sliding_window": None}
    return _qwen(kind, architecture, *sizes, 151936, **heads, **{"max_position_embeddings": 40960, **more})


# The published config.json of each, without the keys that say nothing of sizes or arithmetic. Those of the
# Qwen2.5 models, and of Llama and Mistral from 3B on, are the instruction-tuned ones.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(
        576, 1536, 30, 9, 3, 49152, rope_theta=100000, max_position_embeddings=8192, tie_word_embeddings=True
    ),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8),
    "llama-3.3-70b": _llama3(8192, 28672, 80, 64, 8, head_dim=128),
    "mistral-7b-v0.3": _llama(
        *(4096, 14336, 32, 32, 8, 32768),
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        sliding_window=None,
    ),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, 28, 4, max_window_layers=28),
    "qwen2.5-14b": _qwen25(5120, 13824, 48, 40, 8, max_window_layers=70),
    "qwen3-8b": _qwen3("qwen3", "Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, max_window_layers=36),
    "qwen3-30b-a3b": _qwen3(
        *("qwen3_moe", "Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4),
        decoder_sparse_step=1,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    # For trying programs out, and for their tests.
    "tiny": _llama(64, 128, 2, 4, 2, 512, max_position_embeddings=512),
    "tiny-moe": {
        **_qwen("qwen3_moe", "Qwen3MoeForCausalLM", 64, 96, 2, 4, 2, 512, max_position_embeddings=512),
        **{"bos_token_id": None, "eos_token_id": None, "head_dim": 16, "norm_topk_prob": True},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    },
}


def shape(name: str, layers: int | None) -> dict[str, Any]:
    """The config.json of a shape, with another number of layers where one is given. ValueError for an unknown
    name."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; choose from {', '.join(SHAPES)}")
    return {**SHAPES[name], **({} if layers is None else {"num_hidden_layers": layers})}


@torch.no_grad()
def random_model(
    raw: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    quantize: str | None = None,
    tp: TensorParallel = SINGLE_PROCESS,
) -> Transformer:
    """A model of a config.json with made-up weights, made where they stay; on several ranks each makes up its
    own, the same ones, which are no model's slices but take the same time. MemoryError where they do not
    fit."""
    with torch.device("meta"):
        model = Transformer(parse_config(raw), tp).to(dtype)
        if quantize is not None:
            make_room(model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memory.require({"weights": size}, device, tp)
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
