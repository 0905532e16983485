"""How config.json says what a model is: both the spellings of transformers 4 and those of 5."""

from collections.abc import Mapping
from typing import Any

import torch

from .config import ModelConfig, parse_dtype
from .family import Family
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE
from .rope import RopeConfig

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Reads the content of a config.json, and of a generation_config.json whose token ids come first.

    Raises ValueError for whatever is missing or not understood, naming it.
    """
    family = _find_family(raw)
    for key, accepted in family.accepts.items():
        if raw.get(key) not in (None, *accepted):
            expected = f"supported: {', '.join(map(repr, accepted))}" if accepted else "not supported"
            raise ValueError(f"{key} = {raw[key]!r} in a {family.model_type} config: {expected}")

    num_heads = _size(raw, "num_attention_heads")
    num_layers = _size(raw, "num_hidden_layers")
    num_kv_heads = _size(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    ids = {**raw, **{key: value for key, value in (generation or {}).items() if value is not None}}
    return ModelConfig(
        family=family.model_type,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=_size(raw, "hidden_size"),
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw, family, num_heads),
        max_positions=_max_positions(raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=RopeConfig.from_dict(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=family.windows(raw, num_layers),
        moe=family.moe(raw, num_layers) if family.moe else None,
        stored_dtype=_stored_dtype(raw),
        bos_token_id=next(iter(_token_ids(ids, "bos_token_id")), None),
        eos_token_ids=_token_ids(ids, "eos_token_id"),
    )


def _find_family(raw: Mapping[str, Any]) -> Family:
    architectures = raw.get("architectures") or []
    model_type = raw.get("model_type")
    for family in FAMILIES:
        if model_type == family.model_type and (not architectures or family.architecture in architectures):
            return family
    known = ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES)
    named = f"{', '.join(architectures) or 'none named'} (model_type {model_type!r})"
    raise ValueError(f"architecture {named} is not supported; supported: {known}")


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the config needs a positive whole number {key!r}, got {value!r}")
    return value


def _head_dim(raw: Mapping[str, Any], family: Family, num_heads: int) -> int:
    hidden_size = _size(raw, "hidden_size")
    if raw.get("head_dim") is None and family.default_head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}, "
            "and no head_dim is given"
        )
    head_dim = _size(raw, "head_dim", default=family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd: RoPE rotates pairs")
    return head_dim


def _max_positions(raw: Mapping[str, Any]) -> int:
    limit, rope = _size(raw, "max_position_embeddings"), RopeConfig.from_dict(raw)
    # With YaRN added to a finished model the config keeps the length that the model was trained at.
    return max(limit, int(rope.factor * rope.original_max_positions)) if rope.type == "yarn" else limit


def _stored_dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    return None if name is None else parse_dtype(name)


def _token_ids(ids: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = ids.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) for item in values):
        raise ValueError(f"{key} = {value!r}: expected a token id or a list of them")
    return tuple(values)
