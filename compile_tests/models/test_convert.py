"""GGUF files of every family, written by hand, convert into the model that they were made of."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compile_tests.models.reference import VOCAB, tiny_checkpoint
from compile_tests.models.test_rope import LLAMA3
from inertiakv.models import ModelConfig, load_checkpoint
from inertiakv.models.checkpoint import SINGLE, checkpoint_views
from inertiakv.models.convert import convert_gguf
from inertiakv.models.rope import RopeConfig, inverse_frequencies

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
}


def interleave(weight: Tensor, heads: int) -> Tensor:
    """The order that the format has for Llama: the two halves of a head's rows alternate."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(
    file: Path,
    tensors: dict[str, Tensor],
    config: ModelConfig,
    extra: dict[str, Any],
    ends: Mapping[str, int],
) -> None:
    from gguf import GGUFWriter

    architecture = config.family.replace("_", "")
    writer = GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.moe:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.top_k)
        writer.add_expert_feed_forward_length(config.moe.intermediate_size)
    for key, value in extra.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([chr(0x100 + i) for i in range(VOCAB - 2)] + ["\u0100\u0101", "<end>"])
    writer.add_token_merges(["\u0100 \u0101"])
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(VOCAB - 1)
    for name, token in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)

    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        if architecture == "llama" and "q_proj" in name:
            tensor = interleave(tensor, config.num_heads)
        if architecture == "llama" and "k_proj" in name:
            tensor = interleave(tensor, config.num_kv_heads)
        if ".experts." in name:
            layer, rest = name.removeprefix("model.layers.").split(".mlp.experts.")
            kind = rest.split(".")[1].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", []).append(tensor.numpy())
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.contiguous().numpy())
    for name, stack in experts.items():
        writer.add_tensor(name, np.stack(stack))
    if config.rope.type == "llama3":
        plain = inverse_frequencies(RopeConfig(theta=config.rope.theta), config.head_dim)
        factors = plain / inverse_frequencies(config.rope, config.head_dim)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(
    folder: Path,
    family: str,
    extra: dict[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    ends: Mapping[str, int] = MappingProxyType({}),
    **options: Any,
) -> tuple[Path, ModelConfig]:
    tiny_checkpoint(folder, family, eos_token_id=VOCAB - 1, rms_norm_eps=2.0**-16, **options)
    config = load_checkpoint(folder).config
    tensors = dict(checkpoint_views(load_checkpoint(folder)))
    change(tensors)
    write_gguf(folder / "model.gguf", tensors, config, extra or {}, ends)
    return folder / "model.gguf", config


@pytest.mark.parametrize(
    "family,options",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
    ],
    ids=str,
)
def test_conversion(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    file, config = make(tmp_path, family, **options)
    convert_gguf(file, tmp_path / "out")
    model = load_checkpoint(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    for field in config.__dataclass_fields__:
        if field != "stored_dtype":
            assert getattr(model.config, field) == getattr(config, field), field
    stored = load_file(tmp_path / SINGLE)
    for name, view in checkpoint_views(model):
        assert torch.equal(view, stored[name].to(torch.bfloat16)), name

    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<end>"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.gguf", SINGLE, "out"]


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    extra: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    file, _ = make(tmp_path, "qwen2", extra)
    convert_gguf(file, tmp_path / "out")
    rope = load_checkpoint(tmp_path / "out").config.rope
    assert (rope.type, rope.factor) == (kind, 4.0)


@pytest.mark.parametrize(
    "extra,tensors,message",
    [
        ({"rope.scaling.type": "longrope"}, {}, "'longrope'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": 3.0}, {}, "'yarn' .*yarn_beta_fast"),
        ({}, {"model.layers.1.self_attn.o_proj.weight": None}, r"model\.gguf lacks model.*1.*o_proj\.weight"),
        (
            {},
            {"model.layers.1.self_attn.q_proj.bias": torch.ones(64)},
            r"has \d+ weights, but a llama model of its sizes has \d+",
        ),
        ({}, {"rope_freqs.weight": torch.linspace(1.0, 3.0, 8)}, r"rope_freqs\.weight"),
    ],
    ids=["RoPE type", "YaRN key", "missing tensor", "unknown tensor", "RoPE factors"],
)
def test_what_is_not_understood(
    tmp_path: Path, extra: dict[str, Any], tensors: dict[str, Tensor | None], message: str
) -> None:
    def change(all_tensors: dict[str, Any]) -> None:
        all_tensors.update(tensors)
        for name in [name for name, tensor in tensors.items() if tensor is None]:
            del all_tensors[name]

    file, _ = make(tmp_path, "llama", extra, change)
    with pytest.raises(ValueError, match=message):
        convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_unsupported_architecture(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"gemma3.*supported.*qwen3moe"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"something else entirely, of some length")
    with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"other\.gguf"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "out")


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"gguf and accelerate: pip install 'inertiakv\[gguf\]'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_two_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes while this one converts: its folder stays, ours goes, and nobody fails."""
    from inertiakv.models import convert

    file, _ = make(tmp_path, "llama")
    finish = convert.load_checkpoint

    def other_is_faster(folder: Path, **options: Any) -> Any:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
        return finish(folder, **options)

    monkeypatch.setattr(convert, "load_checkpoint", other_is_faster)
    convert_gguf(file, tmp_path / "out", exist_ok=True)
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["theirs"]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]
    with pytest.raises(FileExistsError, match="out exists"):
        convert_gguf(file, tmp_path / "out")
