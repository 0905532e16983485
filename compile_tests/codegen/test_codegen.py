"""What the decode step becomes on CUDA, checked without a GPU: that it lowers to few kernels of the right
kind and may be recorded as a CUDA graph, that the kernels compile for sm_90 without spilling, and that they
compute the right numbers in Triton's interpreter. What only a GPU can show is left to `compile_tests/gpu`.
"""

from __future__ import annotations

import functools
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


pytestmark = pytest.mark.skipif(_unfit() is not None, reason=str(_unfit()))


@functools.cache
def check(*argv: str) -> dict[str, Any]:
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


REFRESH_FLEX = ("lower", "--backend", "flex", "--refresh", "--kernels")
REFRESH_DENSE = ("lower", "--backend", "dense", "--refresh", "--kernels")
QWEN_7B = ("--heads", "28", "--kv-heads", "4")  # 7 query heads a KV head, which is no power of two
PLAIN_FLEX = ("lower", "--backend", "flex", "--sample", "--batch", "16", *QWEN_7B, "--kernels")
PLAIN_DENSE = ("lower", "--backend", "dense")
ALL = [
    pytest.param(argv, id="-".join(part for part in argv if not part.startswith("--k")).replace("--", ""))
    for argv in (REFRESH_FLEX, REFRESH_DENSE, PLAIN_FLEX, PLAIN_DENSE)
]


@pytest.mark.slow
@pytest.mark.parametrize("argv", ALL)
def test_one_graph_that_may_be_recorded(argv: tuple[str, ...]) -> None:
    result = check(*argv)
    assert (result["graphs"], result["breaks"], result["skips"]) == (1, 0, 0)
    [partition] = result["recorded"]
    assert partition["reason"] is None
    assert partition["mutated"] > 2 * LAYERS, "K and V of every layer, and the tables, are written in place"
    assert partition["moving"] == 0, "what is written in place has to stay at its address"
    functions = result["partitions"] + result["regions"]
    assert not [line for function in functions for line in function["host_lines"]]


@pytest.mark.slow
@pytest.mark.parametrize("argv", ALL)
def test_layers_share_their_kernels(argv: tuple[str, ...]) -> None:
    """One region, called once a layer, and nothing outside it that knows of layers."""
    result = check(*argv)
    [region] = result["regions"]
    assert result["region_calls"] == LAYERS
    assert region["library_calls"] == ["mm"] * 7  # q, k, v, o, gate, up, down
    [step] = result["partitions"]
    assert not any(launch["caches"] for launch in step["launches"])
    assert step["library_calls"].count("mm") == 1  # the vocabulary head
    assert len(step["launches"]) <= 28
    assert len(region["launches"]) <= 20


@pytest.mark.slow
@pytest.mark.parametrize("argv", ALL)
def test_nothing_large_is_made(argv: tuple[str, ...]) -> None:
    """No copy of K or V, no expanded KV heads, no mask of queries x slots x heads: the largest buffers are
    logits, one a query head and slot, or one a word of the vocabulary."""
    batch = int(argv[argv.index("--batch") + 1]) if "--batch" in argv else 1
    assert check(*argv)["largest_buffer"] <= batch * max(32 * 6656, 128256) < batch * KV_ELEMENTS / 16


def region_of(*argv: str) -> tuple[list[int], list[dict[str, int]]]:
    """Of a layer's kernels: how many caches (K or V) each one is given, and what it contains."""
    result = check(*argv)
    [region] = result["regions"]
    kernels = [result["kernels"][launch["kernel"]] for launch in region["launches"]]
    return [launch["caches"] for launch in region["launches"]], kernels


@pytest.mark.slow
def test_flex_attends_in_one_kernel_and_scores_in_two_more() -> None:
    plain_caches, plain = region_of(*PLAIN_FLEX)
    caches, kernels = region_of(*REFRESH_FLEX)
    assert [n for n in plain_caches if n] == [1, 1, 2]  # K and V are written, and read by FlexAttention
    assert [n for n in caches if n] == [1, 1, 2, 1]  # and K read once more, for the scores
    for chosen, given in ((plain, plain_caches), (kernels, caches)):
        attention = chosen[given.index(2)]
        assert attention["tl.dot("] == 2
        assert attention["SPLIT_KV :"] > 0, "FlexAttention's kernel for decoding, not the one for prompts"
    assert len(kernels) <= 12
    last = len(caches) - 1 - caches[::-1].index(1)
    logits, utilities = kernels[last], kernels[last + 1]
    assert logits["tl.sum("] == 4, "the query heads of a KV head share one pass over K"
    assert (utilities["tl.sum("], utilities[".exp("]) == (1, 1), (
        "weights, their mean and the EMA are one kernel"
    )


@pytest.mark.slow
def test_dense_reads_k_and_v_once_and_scores_in_one_more_kernel() -> None:
    plain_caches, plain = region_of(*PLAIN_DENSE)
    caches, kernels = region_of(*REFRESH_DENSE)
    assert [n for n in plain_caches if n] == [n for n in caches if n] == [1, 1, 1, 1]
    assert len(kernels) == len(plain) + 1


@pytest.mark.slow
@pytest.mark.parametrize("argv", [argv for argv in ALL if "--kernels" in argv.values[0]])
def test_kernels_compile_for_sm_90_without_spills(argv: tuple[str, ...]) -> None:
    result = check(*argv)
    compiled = result["compiled"]
    assert {kernel["name"] for kernel in compiled} == set(result["kernels"])
    for kernel in compiled:
        assert 0 < kernel["registers"] <= 255
        if not result["kernels"][kernel["name"]][".sin("]:  # reducing a large angle keeps a table
            assert kernel["local"] == 0, kernel["name"]


@pytest.mark.slow
def test_ranks_exchange_within_the_recorded_graph() -> None:
    """Two sums a layer; embedding, utilities and logits once each."""
    result = check("lower", "--backend", "flex", "--refresh", "--ranks", "2")
    assert (result["graphs"], result["breaks"], result["skips"]) == (1, 0, 0)
    [recorded], [step], [region] = result["recorded"], result["partitions"], result["regions"]
    assert (recorded["reason"], recorded["moving"]) == (None, 0)
    assert region["collectives"] == ["all_reduce"] * 2
    assert sorted(step["collectives"]) == ["all_gather_into_tensor", "all_reduce", "all_reduce"]
    assert not step["host_lines"] + region["host_lines"]


@pytest.mark.slow
def test_a_copy_to_the_host_would_show() -> None:
    result = check("lower", "--backend", "dense", "--plant", "--layers", "1")
    lines = [line for function in result["partitions"] for line in function["host_lines"]]
    assert lines or len(result["recorded"]) != 1 or result["skips"]


EXACT = ("positions", "free slots", "history_BC", "token_B", "position_B")
FLEX_FLOAT32 = ("numbers", "--backend", "flex", "--refresh", "--window", "100", "--steps", "2", "--plant")


def assert_same(difference: dict[str, float], tolerance: float) -> None:
    assert {name: difference[name] for name in EXACT} == dict.fromkeys(EXACT, 0.0)
    assert difference["utilities"] <= tolerance
    assert difference["k and v"] <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, tolerance",
    [
        (FLEX_FLOAT32, 1e-5),
        (("numbers", "--backend", "flex", "--dtype", "bfloat16", "--sample"), 2e-2),
        (("numbers", "--backend", "dense", "--dtype", "bfloat16", "--refresh"), 2e-2),
    ],
    ids=["flex-refresh-float32", "flex-plain-bfloat16", "dense-refresh-bfloat16"],
)
def test_the_interpreted_kernels_compute_what_eager_does(argv: tuple[str, ...], tolerance: float) -> None:
    """Ragged rows, one of them ended, slots in no order and poisoned where empty."""
    assert_same(check(*argv)["clean"], tolerance)


@pytest.mark.slow
def test_mistakes_of_the_compiler_would_show() -> None:
    planted = {name: found for name, found in check(*FLEX_FLOAT32).items() if name != "clean"}
    assert planted
    for difference in planted.values():
        with pytest.raises(AssertionError):
            assert_same(difference, 1e-5)
