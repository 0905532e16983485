"""int8 weights: equal to what they stand for, half the bytes, near enough to the weights they were made of.

Shapes: B batch, T query tokens, V vocabulary, O and I rows and columns of a matrix.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_tests.models.reference import GrowingCache, assert_close, forward, random_tokens, tiny_checkpoint
from inertiakv import Decoder
from inertiakv.models import Transformer, load_checkpoint, load_model
from inertiakv.models.layers import Embedding, Linear
from inertiakv.models.quantize import quantize_into

pytest.importorskip("torchao")


def loaded(folder: Path, family: str = "llama", dtype: str = "float32", **options: Any) -> tuple[Any, Any]:
    """A tiny model and the same one quantised."""
    tiny_checkpoint(folder, family, **options)
    return load_checkpoint(folder, dtype), load_checkpoint(folder, dtype, quantize="int8")


def restored(plain: Transformer, quantized: Transformer) -> Transformer:
    """`plain` with the weights that the quantised ones stand for."""
    for theirs, mine in zip(plain.modules(), quantized.modules(), strict=True):
        if isinstance(mine, Linear | Embedding) and mine.scale is not None:
            theirs.weight.copy_(mine.weight.to(mine.scale.dtype) * mine.scale)
    return plain


def logits(model: Transformer, tokens_BT: Tensor) -> Tensor:
    batch, length = tokens_BT.shape
    return forward(model, tokens_BT, torch.arange(length).expand(batch, -1), GrowingCache())


def num_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize("dtype,most", [("float32", 0.501), ("float16", 1.0), ("bfloat16", 1.0)])
def test_every_matrix_is_within_a_step_of_what_it_was(tmp_path: Path, dtype: str, most: float) -> None:
    plain, quantized = loaded(tmp_path, "qwen2", dtype)
    # Rounding to whole steps, and up to half a step more where a narrow scale has been rounded down.
    for theirs, mine in zip(plain.modules(), quantized.modules(), strict=True):
        if isinstance(mine, Linear):
            assert mine.weight.dtype == torch.int8
            assert mine.scale is not None
            assert mine.scale.dtype == plain.dtype
            steps_OI = theirs.weight.double() / mine.scale.double()
            assert (steps_OI - mine.weight.double()).abs().max() <= most
            assert mine.weight.int().abs().amax(1).min() >= 126  # the whole range is used, in every row


@pytest.mark.parametrize("tied", [False, True])
def test_numbers_are_those_of_the_weights_they_stand_for(tmp_path: Path, tied: bool) -> None:
    plain, quantized = loaded(tmp_path, "qwen2", tie_word_embeddings=tied)
    tokens_BT = random_tokens(2, 12)
    before = logits(plain, tokens_BT)
    actual = logits(quantized, tokens_BT)
    assert (actual - before).abs().max() > 1e-3
    assert_close(actual, logits(restored(plain, quantized), tokens_BT), 1e-5)


def test_what_stays_as_it_is(tmp_path: Path) -> None:
    _, quantized = loaded(tmp_path / "untied", dtype="bfloat16")
    assert quantized.dtype == quantized.embed_tokens.weight.dtype == torch.bfloat16
    assert quantized.lm_head.weight.dtype == torch.int8
    _, tied = loaded(tmp_path / "tied", dtype="bfloat16", tie_word_embeddings=True)
    assert tied.dtype == torch.bfloat16
    assert tied.embed_tokens.weight.dtype == torch.int8
    assert logits(tied, random_tokens(1, 3)).dtype == torch.bfloat16
    norms = [parameter for name, parameter in tied.named_parameters() if "norm" in name]
    assert {parameter.dtype for parameter in norms} == {torch.bfloat16}


def test_large_matrices_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    source_OI = torch.randn(13, 40, generator=torch.Generator().manual_seed(0))
    once, parts = ((torch.empty(13, 40, dtype=torch.int8), torch.empty(13, 1)) for _ in range(2))
    quantize_into(source_OI, *once)
    monkeypatch.setattr("inertiakv.models.quantize._AT_ONCE", 100)
    quantize_into(source_OI, *parts)
    assert torch.equal(once[0], parts[0])
    assert torch.equal(once[1], parts[1])


def test_compiled_tokens_are_the_eager_ones(tmp_path: Path) -> None:
    _, quantized = loaded(tmp_path, "qwen2", num_hidden_layers=2, tie_word_embeddings=True)
    prompts = [random_tokens(1, 40 - row)[0].tolist() for row in range(2)]
    eager, compiled = (Decoder(quantized, None, compile=compile) for compile in (False, True))
    expected = eager.generate(prompts, 16, eos_token_ids=())
    actual = compiled.generate(prompts, 16, eos_token_ids=())
    assert actual.tokens == expected.tokens
    assert actual.stats.graphs.breaks == actual.stats.graphs.recompiles == 0
    assert compiled.cache is not None
    assert compiled.cache.dtype == torch.float32


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="quantize 'int3' is not supported; supported: None, int8"):
        load_model("no/such-model", quantize="int3")
    tiny_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match="experts"):
        load_checkpoint(tmp_path, quantize="int8")
    monkeypatch.setitem(sys.modules, "torchao.quantization.quant_primitives", None)
    with pytest.raises(ValueError, match=r"needs torchao: pip install 'inertiakv\[quant\]'"):
        load_model("no/such-model", quantize="int8")


@pytest.mark.real
@torch.no_grad()
def test_real_weights_keep_their_quality() -> None:
    plain, tokenizer = load_model("smollm2-135m", dtype="bfloat16", device="cpu")
    quantized, _ = load_model("smollm2-135m", dtype="bfloat16", device="cpu", quantize="int8")
    assert num_bytes(quantized) / num_bytes(plain) < 0.505
    text = (Path(__file__).parents[2] / "scripts/demo/lighthouse.txt").read_text()
    tokens_BT = torch.tensor([tokenizer(text).input_ids[:600]])
    before_BTV, after_BTV = (logits(model, tokens_BT).float() for model in (plain, quantized))
    assert (before_BTV.argmax(-1) == after_BTV.argmax(-1)).double().mean() > 0.9
    surprise = [nn.functional.cross_entropy(x[0, :-1], tokens_BT[0, 1:]) for x in (before_BTV, after_BTV)]
    assert abs(surprise[1] - surprise[0]) < 0.02
