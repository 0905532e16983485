"""config.json: both spellings, and an error with a name for what is not understood."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.models.reference import FAMILIES, raw_config, reference_config
from inertiakv.models import ModelConfig, parse_config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "rope", [{}, {"rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0}}], ids=str
)
def test_both_spellings_agree(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    config = reference_config(family, dtype="bfloat16", **rope)
    config.architectures = raw_config(family)["architectures"]
    config.save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = copy.deepcopy(new)
    scaling = old.pop("rope_parameters")
    old["rope_theta"] = scaling.pop("rope_theta")
    old["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    old["torch_dtype"] = old.pop("dtype")
    assert parse_config(new) == parse_config(old)
    assert parse_config(new).stored_dtype == torch.bfloat16


def parse(family: str = "llama", **options: Any) -> ModelConfig:
    return parse_config(raw_config(family, **options))


@pytest.mark.parametrize(
    "family,options,message",
    [
        (
            "llama",
            {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
            "Gemma.*supported",
        ),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ("llama", {"architectures": "absent", "model_type": "phi3"}, "phi3"),
        ("llama", {"model_type": "absent"}, "LlamaForCausalLM.*None"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"sliding_window": 4096}, "sliding_window = 4096 in a llama config"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "longrope"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 4}, "6 .* 4"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers.* 0"),
        ("llama", {"vocab_size": "absent"}, "vocab_size"),
        ("llama", {"max_position_embeddings": "absent"}, "max_position_embeddings"),
        ("llama", {"head_dim": 15}, "head_dim 15"),
        ("llama", {"head_dim": "absent", "hidden_size": 30}, "hidden_size 30"),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no sliding window"),
        ("qwen3_moe", {"num_experts": "absent"}, "num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok 7.* 6"),
    ],
)
def test_what_is_not_understood(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(family, **options)


def test_defaults_of_absent_keys() -> None:
    assert parse(num_key_value_heads="absent").num_kv_heads == 4
    assert not parse(tie_word_embeddings="absent").tie_embeddings
    assert parse(architectures="absent").family == "llama"
    assert parse("qwen3", head_dim="absent").head_dim == 128
    assert parse("mistral", sliding_window="absent").windows == (4096,) * 3
    assert parse("qwen2", sliding_window=8).windows == (None,) * 3
    assert parse("qwen3_moe", num_experts="absent", num_local_experts=6) == parse("qwen3_moe")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_without_layer_types(family: str) -> None:
    """As transformers 4 writes it: the reference, which saves `layer_types`, does not show this rule."""
    slides = {"sliding_window": 8, "use_sliding_window": True}
    assert parse(family, **slides, max_window_layers=1).windows == (None, 8, 8)
    assert parse(family, **slides, max_window_layers=3).windows == (None,) * 3
    assert parse(family, **slides, max_window_layers=0).windows == (8,) * 3
    assert parse(family, **slides, num_hidden_layers=30).windows == (None,) * 28 + (8,) * 2


def test_eos_token_ids() -> None:
    raw = raw_config("llama", eos_token_id=[3, 4])
    assert parse_config(raw).eos_token_ids == (3, 4)
    assert parse_config(raw, {"eos_token_id": [9, 4, -1]}).eos_token_ids == (9, 4, 3)
    assert parse_config(raw, {"eos_token_id": None}).eos_token_ids == (3, 4)
    assert parse_config(raw | {"eos_token_id": None}).eos_token_ids == ()


def test_lengths() -> None:
    assert parse().max_positions == 256
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse(rope_scaling=yarn).max_positions == 1024
    assert parse(rope_scaling={"type": "dynamic", "factor": 2.0}).max_positions == 256
