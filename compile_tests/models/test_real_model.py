"""The default model with its real weights: fetched the first time, from the cache afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.models.reference import GrowingCache, forward
from inertiakv.models import Transformer, load_model
from inertiakv.models.hub import find_folder

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def loaded() -> tuple[Transformer, Any, Path]:
    model, tokenizer = load_model("smollm2-135m", dtype="float32", device="cpu")
    return model, tokenizer, find_folder("smollm2-135m")[0]


def prompt(tokenizer: Any, question: str) -> torch.Tensor:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])


def test_sizes_and_special_tokens(loaded: tuple[Transformer, Any, Path]) -> None:
    model, tokenizer, _ = loaded
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert (model.config.num_layers, model.config.num_heads, model.config.num_kv_heads) == (30, 9, 3)
    assert model.config.head_dim == 64
    assert model.config.max_positions == 8192
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert 2 in model.config.eos_token_ids


@torch.no_grad()
def test_greedy_continuation_equals_the_reference(loaded: tuple[Transformer, Any, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model, tokenizer, folder = loaded
    tokens_BT = prompt(tokenizer, "What is the capital of France, and which river flows through it?")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference.generate(tokens_BT, max_new_tokens=16, do_sample=False)[0, tokens_BT.shape[1] :]

    cache = GrowingCache()
    logits_BTV = forward(model, tokens_BT, torch.arange(tokens_BT.shape[1])[None], cache)
    tokens = [int(logits_BTV[0, -1].argmax())]
    while len(tokens) < len(expected):
        position_B1 = torch.tensor([[tokens_BT.shape[1] + len(tokens) - 1]])
        logits_BTV = forward(model, torch.tensor([[tokens[-1]]]), position_B1, cache)
        tokens.append(int(logits_BTV[0, -1].argmax()))
    assert tokens == expected.tolist()
    assert "Paris" in tokenizer.decode(tokens)
