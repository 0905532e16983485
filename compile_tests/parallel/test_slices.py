"""What a rank holds of a model: slices of files, and what cannot be split or kept alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compile_tests.models.reference import FAMILIES, raw_config, tiny_checkpoint
from compile_tests.models.test_checkpoint import EMBEDDING, HEAD, edit, shard
from compile_tests.tiny_chat import tiny_chat
from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.models import Transformer, load_checkpoint, parse_config
from inertiakv.models.checkpoint import SINGLE, checkpoint_views
from inertiakv.models.parallel import init_tensor_parallel
from inertiakv.scripts import decode

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {"vocab_size": 96, "heads": 8, "kv_heads": 2}


def tp(size: int, rank: int = 0) -> TensorParallel:
    """Of a group that is not there."""
    return TensorParallel(rank, size, "no group")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_slices(family: str, tied: bool, sharded: bool, size: int, tmp_path: Path) -> None:
    """Put together again they are the stored tensors, to the bit."""
    tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied, **SIZES)
    whole = load_file(tmp_path / SINGLE)
    if sharded:
        shard(tmp_path)
    loaded = [load_checkpoint(tmp_path, "float32", tp=tp(size, rank)) for rank in range(size)]
    parts = [dict(checkpoint_views(model)) for model in loaded]
    for name, expected in whole.items():
        of_ranks = [part[name] for part in parts]
        if "norm" in name or "mlp.gate." in name:
            assert all(torch.equal(part, expected) for part in of_ranks)
        elif "o_proj" in name or "down_proj" in name:
            assert torch.equal(torch.cat(of_ranks, dim=1), expected)
        elif "k_proj" in name or "v_proj" in name:
            assert torch.equal(torch.cat(of_ranks[:: size // 2]), expected)
            assert all(torch.equal(of_ranks[i], of_ranks[i - i % (size // 2)]) for i in range(size))
        else:
            assert torch.equal(torch.cat(of_ranks), expected)
    assert {model.config.num_heads for model in loaded} == {8 // size}
    assert {model.config.num_kv_heads for model in loaded} == {1}
    assert {model.tp.kv_copies for model in loaded} == {size // 2}


def test_a_head_that_should_be_tied_is_compared_in_its_own_rows(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, tie_word_embeddings=True, **SIZES)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    load_checkpoint(tmp_path, tp=tp(2, 1))
    edit(tmp_path, lambda tensors: tensors[HEAD][-1].add_(1))
    load_checkpoint(tmp_path, tp=tp(2, 0))
    with pytest.raises(ValueError, match=f"{HEAD}.*tie_word_embeddings"):
        load_checkpoint(tmp_path, tp=tp(2, 1))


@pytest.mark.parametrize(
    "family,size,options,message",
    [
        ("llama", 3, {"kv_heads": 8}, "3 ranks: 8 attention heads are no multiple"),
        ("llama", 2, {"vocab_size": 97}, "2 ranks: a vocabulary of 97 is no multiple"),
        ("llama", 4, {"intermediate_size": 42}, "4 ranks: an intermediate size of 42 is no multiple"),
        ("qwen3_moe", 8, {"moe_intermediate_size": 20}, "8 ranks: experts of size 20 are no multiple"),
        ("llama", 2, {"heads": 6, "kv_heads": 3}, "2 ranks: 3 KV heads"),
    ],
)
def test_uneven_splits_come_before_loading(
    family: str, size: int, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = raw_config(family, **(SIZES | options))
    (tmp_path / "config.json").write_text(json.dumps(raw))  # and no weights, which nobody misses
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, tp=tp(size))


@pytest.mark.parametrize(
    "rule,size,message",
    [
        (EvictionConfig(scorer="entropy"), 2, "entropy"),
        (EvictionConfig(scorer="learned", scorer_file="none.safetensors"), 2, "learned"),
        (policy("kvzip"), 2, "reconstruction"),
        (policy("adakv"), 2, "adaptive"),
        (policy("random", scope="head"), 2, "random"),
        (policy("h2o"), 4, "scope='head'"),
        (policy("adakv_ea", scope="shared", allocation="uniform"), 4, "expected_attention"),
    ],
)
def test_rules_that_need_all_heads(rule: EvictionConfig, size: int, message: str) -> None:
    model = Transformer(parse_config(raw_config("llama", **SIZES)), tp(size))
    with pytest.raises(ValueError, match=rf"{message}.*{size} ranks"):
        Decoder(model, rule, compile=False)


def test_other_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(raw_config("llama", **SIZES))
    with pytest.raises(ValueError, match="record: each of 2 ranks"):
        Decoder(Transformer(config, tp(2)), record=3)
    with pytest.raises(ValueError, match="check_ranks has no effect"):
        Decoder(Transformer(config), check_ranks=True)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match=r"WORLD_SIZE.* must be whole numbers"), init_tensor_parallel():
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="'cuda:1' with 2 ranks"), init_tensor_parallel("cuda:1"):
        pass


def test_alone_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with init_tensor_parallel("cpu") as joining:
        assert joining == (SINGLE_PROCESS, torch.device("cpu"))


@pytest.mark.slow
def test_what_is_wrong_is_said_once() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "scripts/decode.py", "--prompt", "Why?", "--policy", "kvzip", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    message = "error: scorer='reconstruction' looks at all heads together: not with the model on 2 ranks"
    assert done.stderr.count("error: ") == done.stderr.count(message) == 1, done.stderr


@pytest.mark.slow
def test_decode_with_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One answer, that of one process, from a model whose KV head both ranks hold."""
    tiny_chat(tmp_path / "model", heads=4, kv_heads=1)
    arguments = ["--model", str(tmp_path / "model"), "--prompt", "Why is the sea salty?", "--budget", "12"]
    arguments += ["--max-new-tokens", "8", "--dtype", "float64", "--no-compile", "--json", "--device", "cpu"]
    assert decode.main(arguments) == 0
    expected = json.loads(capsys.readouterr().out)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "scripts/decode.py", *arguments, "--check-ranks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout)
    assert actual["rows"] == expected["rows"]
    assert (expected["model"]["ranks"], actual["model"]["ranks"]) == (1, 2)
    assert actual["cache_bytes"] == expected["cache_bytes"]
    assert done.stderr.count("prefill of") == 1
