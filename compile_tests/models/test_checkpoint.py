"""Loading: what is right loads bit by bit; what is not is one error that names the tensor and the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compile_tests.models.reference import (
    FAMILIES,
    GrowingCache,
    assert_close,
    assert_parity,
    forward,
    random_tokens,
    reference_config,
    reference_model,
    save,
    tiny_checkpoint,
)
from inertiakv.models import load_checkpoint
from inertiakv.models.checkpoint import INDEX, SINGLE, checkpoint_views

Tensors = dict[str, Tensor]
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def shard(folder: Path) -> dict[str, str]:
    """Splits the single file into two shards with an index, which is returned."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: files[index % 2] for index, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_loads(folder: Path, expected: Tensors) -> None:
    views = dict(checkpoint_views(load_checkpoint(folder, "float32")))
    assert views.keys() == expected.keys()
    for name, view in views.items():
        assert torch.equal(view, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_finds_its_place(tmp_path: Path, family: str, sharded: bool) -> None:
    expected = load_file(tiny_checkpoint(tmp_path, family) / SINGLE)
    if sharded:
        shard(tmp_path)
    assert_loads(tmp_path, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_shards_of_the_reference(tmp_path: Path, family: str) -> None:
    reference = reference_model(reference_config(family))
    save(reference, tmp_path, max_shard_size="20KB")
    assert not (tmp_path / SINGLE).exists()
    assert_parity(reference, load_checkpoint(tmp_path), steps=2)


def test_a_model_is_for_inference(tmp_path: Path) -> None:
    model = load_checkpoint(tiny_checkpoint(tmp_path))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtypes(tmp_path: Path, key: str) -> None:
    options: dict[str, Any] = {key: "bfloat16"}
    tiny_checkpoint(tmp_path, **options)
    assert load_checkpoint(tmp_path).dtype == torch.bfloat16
    for dtype in ("float32", "torch.float64", torch.float16):
        model = load_checkpoint(tmp_path, dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {model.dtype}
        assert str(model.dtype).endswith(str(dtype).removeprefix("torch."))
    with pytest.raises(ValueError, match=r"int8.*supported.*bfloat16"):
        load_checkpoint(tmp_path, "int8")


def test_dtype_of_the_tensors_where_the_config_names_none(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({n: t.to(torch.float16) for n, t in tensors.items()}))
    assert load_checkpoint(tmp_path).dtype == torch.float16


def test_index_decides(tmp_path: Path) -> None:
    expected = load_file(tiny_checkpoint(tmp_path) / SINGLE)
    weight_map = shard(tmp_path)
    # A stray file, and a second copy of a tensor in the shard that is not its own.
    wrong = {name: torch.full_like(tensor, 7.0) for name, tensor in expected.items()}
    save_file(wrong, tmp_path / "model-00003-of-00003.safetensors")
    other = next(file for file in weight_map.values() if file != weight_map[NORM])
    save_file({**load_file(tmp_path / other), NORM: wrong[NORM], "unlisted": torch.ones(1)}, tmp_path / other)
    assert_loads(tmp_path, expected)


def test_missing_shard(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    file = shard(tmp_path)[NORM]
    (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        load_checkpoint(tmp_path)


def test_tensor_absent_from_its_shard(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    weight_map = shard(tmp_path)
    weight_map[NORM] = next(file for file in weight_map.values() if file != weight_map[NORM])
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=f"{NORM}.*{weight_map[NORM]}"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 5}}'],
)
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tiny_checkpoint(tmp_path) / SINGLE).unlink()
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=INDEX):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1, -4096, None])
def test_truncated_or_extended_file(tmp_path: Path, size: int | None) -> None:
    file = tiny_checkpoint(tmp_path) / SINGLE
    content = file.read_bytes()
    file.write_bytes(content + b"0" if size is None else content[:size])
    with pytest.raises(ValueError, match=f"{SINGLE} is truncated, damaged or no safetensors file"):
        load_checkpoint(tmp_path)


def test_truncated_shard_is_found_before_anything_is_copied(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    file = tmp_path / max(shard(tmp_path).values())
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=file.name):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name,tensor,message",
    [
        (NORM, torch.ones(33), rf"{NORM}.*{SINGLE}.*\[33\].*\[32\]"),
        (NORM, torch.ones(32, dtype=torch.int8), f"{NORM}.*{SINGLE}.*I8"),
        (NORM, None, f"{NORM} is missing"),
        (EMBEDDING, None, f"{EMBEDDING} is missing"),
        (HEAD, None, f"{HEAD} is missing.*does not tie"),
        ("model.layers.1.self_attn.k_proj.weight", None, r"k_proj\.weight is missing"),
        (
            "model.layers.2.mlp.experts.5.down_proj.weight",
            None,
            r"5\.down_proj\.weight is missing",
        ),
        (
            "model.layers.3.mlp.gate.weight",
            torch.ones(3),
            rf"gate\.weight in .*{SINGLE} has no place",
        ),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(3), rf"q_proj\.bias in .*{SINGLE} has no place"),
        ("norm.weight", torch.ones(3), rf"norm\.weight in .*{SINGLE} has no place"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    edit(tmp_path, lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


def test_old_frequency_buffers_are_ignored(tmp_path: Path) -> None:
    expected = load_file(tiny_checkpoint(tmp_path) / SINGLE)
    edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert_loads(tmp_path, expected)


def test_tied_with_and_without_head(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    without = load_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    with_head = load_checkpoint(tmp_path)
    hidden = torch.randn(2, 32)
    assert torch.equal(with_head.head(hidden), without.head(hidden))
    assert torch.equal(without.head(hidden), hidden @ without.embed_tokens.weight.T)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    with pytest.raises(ValueError, match=f"{HEAD}.*{SINGLE}.*tie_word_embeddings"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "names,message",
    [
        (["a.safetensors", "b.safetensors"], "a.safetensors, b.safetensors"),
        (["pytorch_model.bin"], "save_pretrained"),
        (["model.q4.gguf"], "convert_gguf.py"),
        ([], "neither"),
    ],
)
def test_nothing_to_load(tmp_path: Path, names: list[str], message: str) -> None:
    (tiny_checkpoint(tmp_path) / SINGLE).unlink()
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=message):
        load_checkpoint(tmp_path)


def test_config_missing_or_broken(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_checkpoint(tmp_path)


def test_ends_of_both_configs(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path).config.eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert load_checkpoint(tmp_path).config.eos_token_ids == (5, 2)


def test_casting_keeps_frequencies_and_ties(tmp_path: Path) -> None:
    model = load_checkpoint(tiny_checkpoint(tmp_path, tie_word_embeddings=True))
    tokens_BT, positions_BT = random_tokens(1, 9), torch.arange(9)[None] + 1000
    expected = forward(model, tokens_BT, positions_BT, GrowingCache())
    frequencies = model.rotary.inv_freq_R.clone()
    model.to(torch.bfloat16)
    assert model.rotary.inv_freq_R.dtype == torch.float32
    assert torch.equal(model.rotary.inv_freq_R, frequencies)
    logits = forward(model, tokens_BT, positions_BT, GrowingCache())
    assert logits.dtype == torch.bfloat16
    assert_close(logits.float(), expected, 0.05)


@pytest.mark.parametrize("device", ["abacus", "cuda:99", 3.5])
def test_devices_that_cannot_be_used(tmp_path: Path, device: Any) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used: "):
        load_checkpoint(tmp_path, device=device)
