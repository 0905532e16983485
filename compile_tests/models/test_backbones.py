"""The models that the paper measures, and the other shapes: as their published checkpoints are, byte by byte.

Nothing of their weights is needed. The models are built on the meta device from the config.json values in
`scripts/benchmarking/shapes.py`; their checkpoints are written as headers and holes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from inertiakv.cache.slot_cache import CacheShape
from inertiakv.models import Transformer, load_checkpoint, parse_config
from inertiakv.models.checkpoint import INDEX, checkpoint_views
from inertiakv.scripts.benchmarking import traffic
from inertiakv.scripts.benchmarking.shapes import SHAPES

Shapes = dict[str, tuple[int, ...]]


class Published(NamedTuple):
    """`total_size` is the metadata of a checkpoint's model.safetensors.index.json, whose weight map has
    `tensors` names. All weights are bfloat16: there are half as many parameters."""

    total_size: int
    tensors: int
    cache_bytes: int
    """Of a token in bfloat16, 2 * layers * KV heads * head dim * 2, worked out by hand."""


BACKBONES = {
    "llama-3.1-8b": Published(16_060_522_496, 291, 131_072),  # meta-llama/Llama-3.1-8B-Instruct
    "qwen2.5-7b": Published(15_231_233_024, 339, 57_344),  # Qwen/Qwen2.5-7B-Instruct
    "qwen2.5-14b": Published(29_540_067_328, 579, 196_608),  # Qwen/Qwen2.5-14B-Instruct
    "mistral-7b-v0.3": Published(14_496_047_104, 291, 131_072),  # mistralai/Mistral-7B-Instruct-v0.3
    "qwen3-30b-a3b": Published(61_064_245_248, 18_867, 98_304),  # Qwen/Qwen3-30B-A3B, names counted here
    "llama-3.3-70b": Published(141_107_412_992, 723, 327_680),  # meta-llama/Llama-3.3-70B-Instruct
}
# Of what is published as one file, or is no backbone of the paper: parameters, as their model cards count.
OTHERS = {"smollm2-135m": 134_515_008, "llama-3.2-1b": 1_235_814_400, "qwen3-8b": 8_190_735_360}


def built(name: str) -> Transformer:
    with torch.device("meta"):
        return Transformer(parse_config(SHAPES[name])).to(torch.bfloat16)


def published_tensors(raw: dict[str, Any]) -> Shapes:
    """Names and shapes in the checkpoint of a config.json, as transformers saves it."""
    hidden, vocab, heads = raw["hidden_size"], raw["vocab_size"], raw["num_attention_heads"]
    head_dim = raw.get("head_dim", hidden // heads)
    queries, keys = heads * head_dim, raw["num_key_value_heads"] * head_dim

    def mlp(prefix: str, width: int) -> Shapes:
        up = {f"{prefix}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
        return {**up, f"{prefix}.down_proj.weight": (hidden, width)}

    tensors: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for index in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        outputs = {"q": queries, "k": keys, "v": keys}
        tensors |= {f"{layer}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        tensors |= {f"{layer}.self_attn.{part}_proj.weight": (n, hidden) for part, n in outputs.items()}
        tensors[f"{layer}.self_attn.o_proj.weight"] = (hidden, queries)
        if raw["model_type"] == "qwen2":
            tensors |= {f"{layer}.self_attn.{part}_proj.bias": (n,) for part, n in outputs.items()}
        if raw["model_type"].startswith("qwen3"):
            tensors |= {f"{layer}.self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
        if raw["model_type"] == "qwen3_moe":
            tensors[f"{layer}.mlp.gate.weight"] = (raw["num_experts"], hidden)
            for expert in range(raw["num_experts"]):
                tensors |= mlp(f"{layer}.mlp.experts.{expert}", raw["moe_intermediate_size"])
        else:
            tensors |= mlp(f"{layer}.mlp", raw["intermediate_size"])
    return tensors if raw["tie_word_embeddings"] else {**tensors, "lm_head.weight": (vocab, hidden)}


def write_checkpoint(folder: Path, raw: dict[str, Any], tensors: Shapes, shards: int) -> None:
    """A checkpoint with everything but numbers: the files take no room, for behind each header is a hole."""
    (folder / "config.json").write_text(json.dumps(raw))
    size_of_a_shard = 2 * sum(map(math.prod, tensors.values())) / shards
    headers: list[dict[str, Any]] = [{} for _ in range(shards)]
    ends, total = [0] * shards, 0
    for name, shape in tensors.items():
        size, shard = 2 * math.prod(shape), min(shards - 1, int(total / size_of_a_shard))
        offsets = [ends[shard], ends[shard] + size]
        headers[shard][name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        ends[shard], total = offsets[1], total + size
    weight_map = {}
    for number, (header, end) in enumerate(zip(headers, ends, strict=True), 1):
        file = folder / f"model-{number:05}-of-{shards:05}.safetensors"
        weight_map.update(dict.fromkeys(header, file.name))
        text = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", BACKBONES)
def test_a_checkpoint_is_the_published_one(name: str) -> None:
    model, published = built(name), BACKBONES[name]
    views = dict(checkpoint_views(model))
    expected = published_tensors(SHAPES[name])
    assert {tensor: tuple(view.shape) for tensor, view in views.items()} == expected
    assert len(expected) == published.tensors
    assert sum(view.nbytes for view in views.values()) == published.total_size
    # Each number once: no part of a parameter is left out, none is filled twice.
    assert 2 * sum(parameter.numel() for parameter in model.parameters()) == published.total_size


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_every_tensor_of_the_index_is_taken(tmp_path: Path, name: str) -> None:
    """By the loader, down to the last expert; of two layers, since reading many headers takes long."""
    raw = {**SHAPES[name], "num_hidden_layers": 2}
    expected = published_tensors(raw)
    write_checkpoint(tmp_path, raw, expected, shards=3)
    assert load_checkpoint(tmp_path, device="meta").dtype == torch.bfloat16
    # One more would have no place, one less be missed.
    more, less = "model.layers.1.self_attn.more.weight", "model.layers.1.self_attn.k_proj.weight"
    write_checkpoint(tmp_path, raw, {**expected, more: (1,)}, shards=3)
    with pytest.raises(ValueError, match=rf"{more} .* has no place in this model"):
        load_checkpoint(tmp_path, device="meta")
    del expected[less]
    write_checkpoint(tmp_path, raw, expected, shards=3)
    with pytest.raises(ValueError, match=rf"{less} is missing"):
        load_checkpoint(tmp_path, device="meta")


@pytest.mark.parametrize("name", BACKBONES)
def test_cache_bytes_of_a_token(name: str) -> None:
    config, expected = parse_config(SHAPES[name]), BACKBONES[name].cache_bytes
    shape = CacheShape(config.num_layers, 3, config.num_kv_heads, 640, config.head_dim)
    assert shape.nbytes(torch.bfloat16) == 3 * 640 * expected
    assert traffic.kv_bytes(config, [640, 1], torch.bfloat16) == 641 * expected
    assert config.stored_dtype == torch.bfloat16
    assert config.windows == (None,) * config.num_layers


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_of_the_other_shapes(name: str) -> None:
    model = built(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == OTHERS[name]
    views = {tensor: tuple(view.shape) for tensor, view in checkpoint_views(model)}
    assert views == published_tensors(SHAPES[name])
