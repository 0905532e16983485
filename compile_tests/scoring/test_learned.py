"""The learned scorer: its score against a loop over tokens, sizes, and the file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compile_tests.tiny import conversation_state, decoder_for, random_prompt, tiny_model
from inertiakv import EvictionConfig
from inertiakv.scoring.learned import LearnedScorer, load_scorer, save_scorer

SIZES = tiny_model().config
"""4 query heads and 2 KV heads of 8."""


def scorer(heads: int = 6, kv_heads: int = 2, head_dim: int = 4, seed: int = 0) -> LearnedScorer:
    random = torch.Generator().manual_seed(seed)
    return LearnedScorer(heads, kv_heads, head_dim, generator=random).requires_grad_(False)


def queries_and_keys(dtype: torch.dtype, rows: int = 3, tokens: int = 11) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    q_BHD = torch.randn(rows, 6, 4, generator=random, dtype=torch.float64)
    k_BGND = torch.randn(rows, 2, tokens, 4, generator=random, dtype=torch.float64)
    return q_BHD.to(dtype), k_BGND.to(dtype)


def by_the_letter(scorer: LearnedScorer, q_BHD: Tensor, k_BGND: Tensor) -> list[list[float]]:
    """`(Wk k[i]) . (Wq q) / sqrt(64)`, number by number."""
    wk, wq = scorer.wk.double().tolist(), scorer.wq.double().tolist()
    scores = []
    for q_HD, k_GND in zip(q_BHD.double().tolist(), k_BGND.double().tolist(), strict=True):
        q = [x for head in q_HD for x in head]
        wq_q = [sum(w * x for w, x in zip(row, q, strict=True)) for row in wq]
        row_scores = []
        for token in range(len(k_GND[0])):
            k = [x for head in k_GND for x in head[token]]
            wk_k = [sum(w * x for w, x in zip(row, k, strict=True)) for row in wk]
            row_scores.append(sum(a * b for a, b in zip(wk_k, wq_q, strict=True)) / 8.0)
        scores.append(row_scores)
    return scores


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
)
def test_the_score_by_the_letter(dtype: torch.dtype, tolerance: float) -> None:
    form = scorer().to(torch.promote_types(dtype, torch.float32))
    q_BHD, k_BGND = queries_and_keys(dtype)
    score_BN = form.score(q_BHD, k_BGND)
    assert score_BN.dtype == torch.promote_types(dtype, torch.float32)
    expected_BN = torch.tensor(by_the_letter(form, q_BHD, k_BGND), dtype=torch.float64)
    torch.testing.assert_close(score_BN.double(), expected_BN, rtol=tolerance, atol=tolerance)


def test_half_precision_weights_score_in_float32() -> None:
    form = scorer().half()
    q_BHD, k_BGND = queries_and_keys(torch.float32)
    torch.testing.assert_close(form.score(q_BHD, k_BGND), form.float().score(q_BHD, k_BGND))


def test_a_row_scores_as_alone_and_a_spoilt_slot_spoils_no_other() -> None:
    form = scorer()
    q_BHD, k_BGND = queries_and_keys(torch.float32)
    k_BGND[1, :, 4] = torch.nan
    score_BN = form.score(q_BHD, k_BGND)
    assert score_BN.isnan().nonzero().tolist() == [[1, 4]]
    torch.testing.assert_close(form.score(q_BHD[:1], k_BGND[:1]), score_BN[:1])


def test_parameters_of_llama_8b() -> None:
    form = LearnedScorer(32, 8, 128)
    assert sum(parameter.numel() for parameter in form.parameters()) == 327_680
    assert form.wk.shape == (64, 1024)
    assert form.wq.shape == (64, 4096)


@pytest.mark.parametrize("sizes", [(0, 2, 8), (4, 0, 8), (4, 2, 0)])
def test_sizes_that_are_none(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        LearnedScorer(*sizes)


def test_queries_and_keys_of_another_model() -> None:
    form = scorer()
    q_BHD, k_BGND = queries_and_keys(torch.float32)
    with pytest.raises(ValueError, match=r"queries are \[B, 6, 4\] to this scorer, got \[3, 5, 4\]"):
        form.score(q_BHD[:, :5], k_BGND)
    with pytest.raises(ValueError, match=r"keys are \[B, 2, N, 4\] to this scorer, got \[3, 1, 11, 4\]"):
        form.score(q_BHD, k_BGND[:, :1])


# The file
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "form.safetensors"
    save_scorer(path, scorer(4, 2, 8), {"lr": 0.5, "note": "größer"})
    return path


def test_what_is_saved_is_loaded(saved: Path) -> None:
    loaded, original = load_scorer(saved, SIZES), scorer(4, 2, 8)
    assert torch.equal(loaded.wk, original.wk)
    assert torch.equal(loaded.wq, original.wq)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert json.loads(saved.with_suffix(".json").read_text("utf-8")) == {"lr": 0.5, "note": "größer"}


def test_the_file_keeps_the_dtype_and_loading_chooses_one(saved: Path) -> None:
    size = saved.stat().st_size
    save_scorer(saved, scorer(4, 2, 8).half(), {})
    assert saved.stat().st_size < 0.6 * size
    assert load_scorer(saved, SIZES).wk.dtype == torch.float32
    loaded = load_scorer(saved, SIZES, dtype=torch.float64)
    assert torch.equal(loaded.wk, scorer(4, 2, 8).wk.half().double())


@dataclass(frozen=True)
class OtherSizes:
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 8


def test_a_scorer_of_another_model(saved: Path) -> None:
    with pytest.raises(ValueError, match="does not fit 4 query heads and 1 KV heads of 8") as error:
        load_scorer(saved, OtherSizes())  # type: ignore[arg-type]
    assert "expected wk [64, 8], wq [64, 32], found wk [64, 16], wq [64, 32]" in str(error.value)


@pytest.mark.parametrize(
    "tensors, found",
    [({}, "found nothing"), ({"wk": torch.zeros(64, 16)}, r"found wk \[64, 16\]$")],
    ids=["none", "half of it"],
)
def test_a_file_with_other_tensors(tmp_path: Path, tensors: dict[str, Tensor], found: str) -> None:
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=found):
        load_scorer(tmp_path / "other.safetensors", SIZES)


def test_files_that_are_no_scorer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no learned scorer at .*gone\.safetensors; scripts/train_scorer"):
        load_scorer(tmp_path / "gone.safetensors", SIZES)
    (tmp_path / "text.safetensors").write_text("not a safetensors file")
    with pytest.raises(ValueError, match="no readable safetensors file"):
        load_scorer(tmp_path / "text.safetensors", SIZES)
    with pytest.raises(ValueError, match=r"ends in \.safetensors, got '.*form\.json'"):
        save_scorer(tmp_path / "form.json", scorer(), {})
    assert not (tmp_path / "form.json").exists()


def test_the_example_fits_its_model() -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "smollm2-135m-scorer.safetensors"
    settings = json.loads(path.with_suffix(".json").read_text("utf-8"))
    sizes = OtherSizes(num_heads=9, num_kv_heads=3, head_dim=64)
    assert settings["sizes"] == {**dataclasses.asdict(sizes), "rank": 64}
    form = load_scorer(path, sizes)  # type: ignore[arg-type]
    assert sum(parameter.numel() for parameter in form.parameters()) == 49_152
    assert all(parameter.isfinite().all() for parameter in form.parameters())


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_decoder_keeps_what_the_learned_scorer_prefers(tmp_path: Path, compile: bool) -> None:
    """By its scores of the first step, computed here from the cached keys and the query."""
    model = tiny_model(5, dtype=torch.float32, layers=1)
    sizes = model.config
    generator = torch.Generator().manual_seed(3)
    scorer = LearnedScorer(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, generator=generator)
    path = tmp_path / "scorer.safetensors"
    save_scorer(path, scorer, {})
    rule = EvictionConfig(budget=12, scorer="learned", scorer_file=str(path), aggregation="single")
    decoder = decoder_for(model, rule, compile=compile)
    prompt, queries = random_prompt(50), []
    with patch.object(LearnedScorer, "score", autospec=True, side_effect=LearnedScorer.score) as score:
        out = decoder.generate(prompt, 2, eos_token_ids=[])
        queries = score.call_args_list
    (_, q_BHD, k_BGND), _ = queries[0]
    expected_N = scorer.score(q_BHD, k_BGND)[0, :51]
    assert conversation_state(decoder).kept == sorted(expected_N.topk(12).indices.tolist())
    assert out.stats.kept_tokens == [12]
    if compile:
        eager = decoder_for(model, rule).generate(prompt, 20, eos_token_ids=[])
        assert decoder.generate(prompt, 20, eos_token_ids=[]).tokens == eager.tokens
