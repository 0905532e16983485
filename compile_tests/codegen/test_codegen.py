"""What the decode step becomes on CUDA, checked without a GPU: that it lowers to few kernels of the right
kind and may be recorded as a CUDA graph, that the kernels compile for sm_90 without spilling, and that they
compute the right numbers in Triton's interpreter. What only a GPU can show is left to `compile_tests/gpu`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"torch": "2.13.0", "triton": "3.7.1"}
LAYERS = 3
KV_ELEMENTS = 8 * 6656 * 128
"""K of one layer and row: what must never be allocated again, whole or in float32 or for every query head."""


def _unfit() -> str | None:
    if torch.cuda.is_available():
        return "there is a GPU: compile_tests/gpu checks on it"
    for package, needed in NEEDED.items():
        try:
            found = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != needed:
            return f"made for {package} {needed}, found {found}"
    return None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(_unfit() is not None, reason=str(_unfit()))]


def check(*checks: str) -> list[dict[str, Any]]:
    """What these come out with, one after the other in one process."""
    argv = " --then ".join(checks).split()
    run = subprocess.run(
        [sys.executable, "-m", "compile_tests.codegen.check", *argv],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


QWEN_7B = "--heads 28 --kv-heads 4"  # 7 query heads a KV head, which is no power of two


def lowered(result: dict[str, Any], batch: int = 1) -> tuple[list[int], list[dict[str, int]]]:
    """Of the kernels of a layer: how many caches (K or V) each one is given, and what it contains."""
    [region], [step] = result["regions"], result["partitions"]
    assert_recordable(result)
    partition = result["recorded"][0]
    assert partition["mutated"] > 2 * LAYERS, "K and V of every layer, and the tables, are written in place"

    # Layers share their kernels: one region, called once a layer, and nothing outside it knows of layers.
    assert result["region_calls"] == LAYERS
    assert region["library_calls"] == ["mm"] * 7  # q, k, v, o, gate, up, down
    assert not any(launch["caches"] for launch in step["launches"])
    assert step["library_calls"].count("mm") == 1  # the vocabulary head
    assert len(step["launches"]) <= 28
    assert len(region["launches"]) <= 20

    # No copy of K or V, no expanded KV heads, no mask of queries x slots x heads: the largest buffers are
    # logits, one a query head and slot, or one a word of the vocabulary.
    assert result["largest_buffer"] <= batch * max(32 * 6656, 128256) < batch * KV_ELEMENTS / 16

    if result["compiled"]:  # for sm_90, without spills
        assert {kernel["name"] for kernel in result["compiled"]} == set(result["kernels"])
        for kernel in result["compiled"]:
            assert 0 < kernel["registers"] <= 255
            if not result["kernels"][kernel["name"]][".sin("]:  # reducing a large angle keeps a table
                assert kernel["local"] == 0, kernel["name"]

    launches = region["launches"]
    return [launch["caches"] for launch in launches], [result["kernels"][x["kernel"]] for x in launches]


def assert_recordable(result: dict[str, Any]) -> None:
    """One graph, which may be recorded as a CUDA graph and never touches the host."""
    assert (result["graphs"], result["breaks"], result["skips"]) == (1, 0, 0)
    assert [partition["reason"] for partition in result["recorded"]] == [None]
    [partition] = result["recorded"]
    assert partition["moving"] == 0, "what is written in place has to stay at its address"
    functions = result["partitions"] + result["regions"]
    assert not [line for function in functions for line in function["host_lines"]]


def assert_attends_in_one_kernel(caches: list[int], kernels: list[dict[str, int]]) -> None:
    attention = kernels[caches.index(2)]
    assert attention["tl.dot("] == 2
    assert attention["SPLIT_KV :"] > 0, "FlexAttention's kernel for decoding, not the one for prompts"


def test_flex_attends_in_one_kernel() -> None:
    (result,) = check(f"lower --backend flex --sample {QWEN_7B} --kernels --batch 16")
    caches, kernels = lowered(result, batch=16)
    assert result["compiled"]
    assert [n for n in caches if n] == [1, 1, 2]  # K and V are written, and read by FlexAttention
    assert_attends_in_one_kernel(caches, kernels)


def test_flex_scores_in_two_more_kernels() -> None:
    (result,) = check("lower --backend flex --refresh --kernels")
    caches, kernels = lowered(result)
    assert result["compiled"]
    assert [n for n in caches if n] == [1, 1, 2, 1]  # K is read once more, for the scores
    assert_attends_in_one_kernel(caches, kernels)
    assert len(kernels) <= 12
    last = len(caches) - 1 - caches[::-1].index(1)
    logits, utilities = kernels[last], kernels[last + 1]
    assert logits["tl.sum("] == 4, "the query heads of a KV head share one pass over K"
    assert (utilities["tl.sum("], utilities[".exp("]) == (1, 1), "weights, mean and EMA are one kernel"


def test_dense_reads_k_and_v_once_and_scores_in_one_more_kernel() -> None:
    scoring, without, copying = check(
        "lower --backend dense --refresh --kernels",
        "lower --backend dense",
        "lower --backend dense --plant --layers 1",
    )
    assert scoring["compiled"]
    (caches, kernels), (plain_caches, plain) = lowered(scoring), lowered(without)
    assert [n for n in plain_caches if n] == [n for n in caches if n] == [1, 1, 1, 1]
    assert len(kernels) == len(plain) + 1
    with pytest.raises(AssertionError):  # a copy to the host would show
        assert_recordable(copying)


def test_ranks_exchange_within_the_recorded_graph() -> None:
    """Two sums a layer; embedding, utilities and logits once each."""
    (result,) = check("lower --backend flex --refresh --ranks 2")
    assert_recordable(result)
    [step], [region] = result["partitions"], result["regions"]
    assert region["collectives"] == ["all_reduce"] * 2
    assert sorted(step["collectives"]) == ["all_gather_into_tensor", "all_reduce", "all_reduce"]


EXACT = ("positions", "free slots", "history_BC", "token_B", "position_B")


def assert_same(difference: dict[str, float], tolerance: float) -> None:
    assert {name: difference[name] for name in EXACT} == dict.fromkeys(EXACT, 0.0)
    assert difference["utilities"] <= tolerance
    assert difference["k and v"] <= tolerance


@pytest.mark.parametrize(
    "argv, tolerance",
    [
        ("--backend flex --refresh --window 100 --steps 2 --plant", 1e-5),
        ("--backend flex --dtype bfloat16 --sample", 2e-2),
        ("--backend dense --dtype bfloat16 --refresh", 2e-2),
    ],
)
def test_the_interpreted_kernels_compute_what_eager_does(argv: str, tolerance: float) -> None:
    """Ragged rows, one of them ended, slots in no order and poisoned where empty. Mistakes would show."""
    (found,) = check(f"numbers {argv}")
    assert_same(found.pop("clean"), tolerance)
    assert len(found) == (3 if "--plant" in argv else 0)
    for difference in found.values():
        with pytest.raises(AssertionError):
            assert_same(difference, tolerance)
