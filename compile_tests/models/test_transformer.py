"""Every family against transformers, in float32: all logits of a prefill and of 20 decode steps. A compiled
decode step is one graph and equals the eager one.

Shapes: B batch, T query tokens, V vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from compile_tests.models.reference import (
    FAMILIES,
    GrowingCache,
    StaticCache,
    assert_close,
    assert_parity,
    forward,
    random_tokens,
    reference_config,
    reference_model,
    save,
)
from inertiakv.models import Transformer, load_checkpoint

GROUPINGS = [(4, 4), (6, 2), (8, 2), (6, 1), (14, 2), (16, 2)]  # groups of 1, 3, 4, 6, 7, 8 heads


def pair(folder: Path, config: Any) -> tuple[Any, Transformer]:
    reference = reference_model(config)
    return reference, load_checkpoint(save(reference, folder), "float32")


@pytest.mark.parametrize("heads,kv_heads", GROUPINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_head_groupings(tmp_path: Path, family: str, heads: int, kv_heads: int) -> None:
    assert_parity(*pair(tmp_path, reference_config(family, heads, kv_heads)), batch=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings(tmp_path: Path, family: str) -> None:
    reference, model = pair(tmp_path, reference_config(family, tie_word_embeddings=True))
    assert model.lm_head is None
    assert_parity(reference, model)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_head_dim_from_hidden_size(tmp_path: Path, family: str) -> None:
    reference, model = pair(tmp_path, reference_config(family, head_dim="absent"))
    assert model.config.head_dim == 8
    assert_parity(reference, model)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 2]},
        {"num_experts": 3, "num_experts_per_tok": 3},
        {"num_experts": 40, "num_experts_per_tok": 1},
        {"num_experts": 0},
    ],
    ids=str,
)
def test_mixture_of_experts(tmp_path: Path, normalise: bool, options: dict[str, Any]) -> None:
    config = reference_config("qwen3_moe", norm_topk_prob=normalise, **options)
    assert_parity(*pair(tmp_path, config), batch=2)


SCALED: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 24}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {**SCALED, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": SCALED,
    "yarn attention_factor": {**SCALED, "attention_factor": 1.3},
    "yarn mscale": {**SCALED, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn betas": {**SCALED, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
}


@pytest.mark.parametrize("prompt", [12, 70])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_types(tmp_path: Path, rope: str, prompt: int) -> None:
    # The shorter prompt crosses the original length while decoding, the longer one begins beyond it.
    parameters = {"rope_type": rope.split()[0], "rope_theta": 500.0, **ROPES[rope]}
    assert_parity(*pair(tmp_path, reference_config("llama", rope_parameters=parameters)), prompt)


def test_dynamic_rope_up_to_its_length(tmp_path: Path) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    config = reference_config("llama", rope_parameters=parameters, max_position_embeddings=32)
    reference, model = pair(tmp_path, config)
    assert model.config.max_positions == 32
    assert_parity(reference, model, prompt=12, steps=20)


SLIDES = {"sliding_window": 8, "use_sliding_window": True}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "mistral": ("mistral", {"sliding_window": 8}, (8, 8, 8)),
    "qwen2 upper layers": ("qwen2", {**SLIDES, "max_window_layers": 1}, (None, 8, 8)),
    "qwen2 switched off": ("qwen2", {**SLIDES, "use_sliding_window": False}, (None,) * 3),
    "qwen3 layer types": ("qwen3", {**SLIDES, "layer_types": TYPES}, (8, None, 8)),
    "qwen3_moe": ("qwen3_moe", SLIDES, (8, 8, 8)),
}


@pytest.mark.parametrize("prompt", [3, 7, 8, 9, 21])
@pytest.mark.parametrize("case", WINDOWS)
def test_sliding_windows(tmp_path: Path, case: str, prompt: int) -> None:
    family, options, windows = WINDOWS[case]
    reference, model = pair(tmp_path, reference_config(family, **options))
    assert model.config.windows == windows
    assert_parity(reference, model, prompt)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe"])
def test_ragged_batch(tmp_path: Path, family: str) -> None:
    options: dict[str, Any] = {"sliding_window": 8} if family == "mistral" else {}
    reference, model = pair(tmp_path, reference_config(family, **options))
    lengths, steps = torch.tensor([5, 17, 11]), 20
    tokens_BT = random_tokens(3, int(lengths.max()) + steps)

    cache = GrowingCache()
    prompt = torch.arange(int(lengths.max())).expand(3, -1)
    positions_BT = torch.where(prompt < lengths[:, None], prompt, -1)
    logits = [forward(model, tokens_BT[:, : prompt.shape[1]], positions_BT, cache)]
    for step in range(steps):
        positions_B1 = lengths[:, None] + step
        logits.append(forward(model, tokens_BT.gather(1, positions_B1), positions_B1, cache))

    for row, length in enumerate(lengths.tolist()):
        with torch.no_grad():
            expected_TV = reference(tokens_BT[row : row + 1, : length + steps], use_cache=False).logits[0]
        assert_close(logits[0][row, :length], expected_TV[:length])
        assert_close(torch.stack([step[row, 0] for step in logits[1:]]), expected_TV[length:])


def test_float64_model_computes_in_float64(tmp_path: Path) -> None:
    save(reference_model(reference_config("qwen3_moe")), tmp_path)
    models = [load_checkpoint(tmp_path, dtype) for dtype in ("float32", "float64")]
    tokens_BT, positions_BT = random_tokens(1, 30), torch.arange(30)[None]
    single, double = (forward(model, tokens_BT, positions_BT, GrowingCache()) for model in models)
    assert double.dtype == torch.float64
    assert_close(single, double, 1e-5)
    # One token at a time adds up in another order; in float64 that is all but invisible.
    cache = GrowingCache()
    steps = [
        forward(models[1], tokens_BT[:, t : t + 1], positions_BT[:, t : t + 1], cache) for t in range(30)
    ]
    assert_close(torch.cat(steps, 1), double, 1e-12)


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


# Code is generated once, for a dense and a sparse layer; for the rest a trace will do. Two rows go
# through their chosen experts; five make more pairs than there are experts: the grouped product.
@pytest.mark.parametrize(
    "family,batch,backend",
    [
        ("qwen3_moe", 1, "inductor"),
        ("qwen2", 1, "aot_eager"),
        ("qwen3_moe", 2, "aot_eager"),
        ("qwen3_moe", 5, "aot_eager"),
    ],
)
def test_decode_step_is_one_graph(tmp_path: Path, family: str, batch: int, backend: str) -> None:
    dense_layer = {"mlp_only_layers": [0]} if family == "qwen3_moe" else {}
    _, model = pair(tmp_path, reference_config(family, num_hidden_layers=2, **dense_layer))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)
    tokens_BT = random_tokens(batch, 6)
    expected = decode(model, tokens_BT, step)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close(decode(model, tokens_BT, compiled), expected, 1e-5)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("dtype,tolerance", [("bfloat16", 0.05), ("float64", 1e-12)])
def test_traced_dtypes(tmp_path: Path, dtype: str, tolerance: float, batch: int) -> None:
    model = pair(tmp_path, reference_config("qwen3_moe", num_hidden_layers=2))[1].to(getattr(torch, dtype))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    tokens_BT = random_tokens(batch, 4)
    logits = decode(model, tokens_BT, compiled)
    assert logits.dtype == model.dtype
    assert_close(logits, decode(model, tokens_BT, step), tolerance)
