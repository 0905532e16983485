"""A decode step is one graph, equal to the eager model, and reads no expert that it did not choose."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from compile_tests.models.reference import (
    StaticCache,
    assert_close,
    random_tokens,
    reference_config,
    reference_model,
    save,
)
from inertiakv.models import Transformer, load_checkpoint


def make(folder: Path, family: str, dtype: str = "float32", **options: Any) -> Transformer:
    save(reference_model(reference_config(family, num_hidden_layers=2, **options)), folder)
    return load_checkpoint(folder, dtype)


def decode(model: Transformer, tokens_BT: Tensor, step: Any) -> Tensor:
    """Logits of feeding the tokens one by one through `step`."""
    cache = StaticCache(model.config, tokens_BT.shape[0], tokens_BT.shape[1], model.dtype)
    logits = []
    for t in range(tokens_BT.shape[1]):
        cache.query_B.fill_(t)
        logits.append(step(model, tokens_BT[:, t : t + 1].contiguous(), cache).clone())
    return torch.cat(logits, 1)


@torch.no_grad()
def step(model: Transformer, tokens_B1: Tensor, cache: StaticCache) -> Tensor:
    return model.head(model(tokens_B1, cache.query_B[:, None], cache))


# The compiler's own loops once for a dense and once for an MoE model; for the other paths a trace will do.
# Two rows go through their chosen experts; five make more pairs than there are experts: the grouped product.
@pytest.mark.parametrize(
    "family,batch,backend",
    [
        ("qwen2", 1, "inductor"),
        ("qwen3_moe", 1, "inductor"),
        ("qwen3_moe", 2, "aot_eager"),
        ("qwen3_moe", 5, "aot_eager"),
    ],
)
def test_decode_step_is_one_graph(tmp_path: Path, family: str, batch: int, backend: str) -> None:
    model = make(tmp_path, family)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)
    tokens_BT = random_tokens(batch, 6)
    expected = decode(model, tokens_BT, step)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close(decode(model, tokens_BT, compiled), expected, 1e-5)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("dtype,tolerance", [("bfloat16", 0.05), ("float64", 1e-12)])
def test_traced_dtypes(tmp_path: Path, dtype: str, tolerance: float, batch: int) -> None:
    model = make(tmp_path, "qwen3_moe", dtype)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    tokens_BT = random_tokens(batch, 4)
    logits = decode(model, tokens_BT, compiled)
    assert logits.dtype == model.dtype
    assert_close(logits, decode(model, tokens_BT, step), tolerance)
