"""What a model is, and how config.json says so: in the spelling of transformers 4 or 5."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .family import FAMILIES, Family, MoEConfig, RawConfig
from .rope import RopeConfig

ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "quantization_config": (),
}
"""See `Family.accepts`."""
_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's arithmetic."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # one entry a layer: the sliding window, None for full attention
    moe: MoEConfig | None = None
    stored_dtype: torch.dtype | None = None  # the dtype that config.json names, if it does
    eos_token_ids: tuple[int, ...] = ()

    def mlp_bytes(self, dtype: torch.dtype) -> int:
        """What a token takes within the widest MLP, beside its input: gate, up and their product; of experts
        those of each of its own, or what they give in float32, weighted and not."""
        size, moe = dtype.itemsize, self.moe
        if moe is None:
            return 3 * size * self.intermediate_size
        wide = torch.promote_types(dtype, torch.float32).itemsize
        within = size * (2 * self.hidden_size + 4 * moe.intermediate_size)
        return moe.top_k * max(within, 2 * wide * self.hidden_size)


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """A dtype from its name, with or without `torch.` before it. Raises ValueError for any other dtype."""
    short = str(name).removeprefix("torch.")
    if short not in _DTYPES:
        raise ValueError(f"dtype {short!r} is not supported; supported: auto, {', '.join(_DTYPES)}")
    dtype: torch.dtype = getattr(torch, short)
    return dtype


def parse_config(raw: RawConfig, generation: RawConfig | None = None) -> ModelConfig:
    """Reads the content of a config.json, and of a generation_config.json. EOS ids are those of both.

    Raises ValueError for whatever is missing or not understood, naming it where it is no value of another
    type.
    """
    try:
        return _parse(raw, generation or {})
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:  # a value of another type
        raise ValueError(f"the config is not understood: {type(error).__name__}: {error}") from error


def _parse(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    family = _find_family(raw)
    for key, accepted in {**ACCEPTED, **family.accepts}.items():
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
    max_positions, rope = _size(raw, "max_position_embeddings"), RopeConfig.from_dict(raw)
    if rope.type == "yarn":
        # With YaRN added to a finished model the config keeps the length that the model was trained at.
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return ModelConfig(
        family=family.model_type,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=_size(raw, "hidden_size"),
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw, family, num_heads),
        max_positions=max_positions,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=family.windows(raw, num_layers),
        moe=family.moe(raw, num_layers),
        stored_dtype=None if dtype is None else parse_dtype(dtype),
        eos_token_ids=unite_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
    )


def unite_ids(*given: Any) -> tuple[int, ...]:
    """The end-of-sequence ids in all that is given, each once: an id, a list of ids, or None. A negative one
    stands for none. Raises ValueError for what is no id."""
    lists = [ids if isinstance(ids, list | tuple) else [] if ids is None else [ids] for ids in given]
    for ids in lists:
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise ValueError(f"eos_token_id = {ids!r}: expected a token id or a list of them")
    return tuple(dict.fromkeys(token for ids in lists for token in ids if token >= 0))


def _find_family(raw: RawConfig) -> Family:
    architectures = raw.get("architectures") or []
    model_type = raw.get("model_type")
    for family in FAMILIES:
        if model_type == family.model_type and (not architectures or family.architecture in architectures):
            return family
    known = ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES)
    named = f"{', '.join(architectures) or 'none named'} (model_type {model_type!r})"
    raise ValueError(
        f"architecture {named} is not supported; supported: {known}. A model of transformers can evict, too: "
        "see inertiakv.integrations.transformers.InertiaCache"
    )


def _size(raw: RawConfig, key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the config needs a positive whole number {key!r}, got {value!r}")
    return value


def _head_dim(raw: RawConfig, family: Family, num_heads: int) -> int:
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
