"""Well-known models as shapes: their config.json, and random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inertiakv.cache import memory
from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.models import Transformer, parse_config
from inertiakv.models.quantize import make_room

NOISE = 4_194_301
"""How many random numbers are drawn; larger tensors repeat them. A prime, so that no two rows are alike."""
SCALE = 0.02
"""Standard deviation of weights."""
INT8_SCALE = 32.0
"""That of int8 weights before they are scaled."""

_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)


def _family(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    same = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return {"architectures": [architecture], "model_type": model_type, **same, **more}


def _config(family: dict[str, Any], *sizes: int, **more: Any) -> dict[str, Any]:
    """`sizes`: hidden and intermediate size, layers, attention heads, KV heads, vocabulary."""
    return {**family, **dict(zip(_KEYS, sizes, strict=True)), **more}


_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE |= {"factor": 8.0, "original_max_position_embeddings": 8192}
_LLAMA = _family("llama", "LlamaForCausalLM", rms_norm_eps=1e-05, max_position_embeddings=131072)
_LLAMA3 = _LLAMA | {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "rope_scaling": _ROPE}
_LLAMA3 |= {"rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False}
_MISTRAL = _family("mistral", "MistralForCausalLM", bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-05)
_MISTRAL |= {"rope_theta": 1000000.0, "max_position_embeddings": 32768, "sliding_window": None}
_QWEN = {"bos_token_id": 151643, "eos_token_id": 151645, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0}
_QWEN |= {"use_sliding_window": False}
_QWEN25 = _family("qwen2", "Qwen2ForCausalLM", **_QWEN, max_position_embeddings=32768, sliding_window=131072)
_QWEN3 = _family("qwen3", "Qwen3ForCausalLM", **_QWEN, max_position_embeddings=40960, sliding_window=None)
_QWEN3 |= {"attention_bias": False, "head_dim": 128, "rope_scaling": None}
_QWEN3_MOE = _QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
_QWEN3_MOE |= {"norm_topk_prob": True}

# The published config.json of each, without the keys that say nothing of sizes or arithmetic. Those of the
# Qwen2.5 models, and of Llama and Mistral from 3B on, are of the instruction-tuned ones.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _config(_LLAMA, 576, 1536, 30, 9, 3, 49152)
    | {"rope_theta": 100000, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    "llama-3.2-1b": _config(_LLAMA3, 2048, 8192, 16, 32, 8, 128256)
    | {"head_dim": 64, "rope_scaling": _ROPE | {"factor": 32.0}, "tie_word_embeddings": True},
    "llama-3.1-8b": _config(_LLAMA3, 4096, 14336, 32, 32, 8, 128256),
    "llama-3.3-70b": _config(_LLAMA3, 8192, 28672, 80, 64, 8, 128256, head_dim=128),
    "mistral-7b-v0.3": _config(_MISTRAL, 4096, 14336, 32, 32, 8, 32768),
    "qwen2.5-7b": _config(_QWEN25, 3584, 18944, 28, 28, 4, 152064, max_window_layers=28),
    "qwen2.5-14b": _config(_QWEN25, 5120, 13824, 48, 40, 8, 152064, max_window_layers=70),
    "qwen3-8b": _config(_QWEN3, 4096, 12288, 36, 32, 8, 151936, max_window_layers=36),
    "qwen3-30b-a3b": _config(_QWEN3_MOE, 2048, 6144, 48, 32, 4, 151936, max_window_layers=48)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    # For trials and tests.
    "tiny": _config(_LLAMA, 64, 128, 2, 4, 2, 512, max_position_embeddings=512),
    "tiny-moe": _config(_QWEN3_MOE, 64, 96, 2, 4, 2, 512, max_position_embeddings=512)
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"head_dim": 16, "bos_token_id": None, "eos_token_id": None},
}


def shape(name: str, layers: int | None) -> dict[str, Any]:
    """The config.json of a shape, with `layers` layers if given. ValueError for an unknown name."""
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
    """A model of a config.json with random weights, made on its device. With several ranks all draw the same
    weights: not slices of one model, but just as fast. MemoryError if they do not fit."""
    with torch.device("meta"):
        model = Transformer(parse_config(raw), tp).to(dtype)
        if quantize is not None:
            make_room(model)
    memory.require({"weights": sum(parameter.nbytes for parameter in model.parameters())}, device, tp)
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
    """Let a model take `positions` positions even if it was not made for so many: what it says is of no use
    then, but its speed is the same."""
    if model.config.max_positions < positions:
        model.config = dataclasses.replace(model.config, max_positions=positions)
