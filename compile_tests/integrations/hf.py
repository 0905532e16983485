"""Tiny random models of transformers, the same as ours, and what to ask them.

Shapes: B batch, S tokens of a padded batch.
"""

import functools
import inspect
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from compile_tests.models.reference import VOCAB, reference_config, reference_model, save
from compile_tests.tiny import RowState, set_states
from inertiakv import Decoder, EvictionConfig
from inertiakv.integrations.transformers import InertiaCache
from inertiakv.models import Transformer, load_checkpoint

PAD = 0
NOTHING_EVICTED = EvictionConfig(budget=5000)

OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 12, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 10},
    "gemma3_text": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": None,
    },
    "phi3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "gpt_oss": {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Model types that we have no model for."""


@functools.cache
def pair(family: str, **options: Any) -> tuple[Any, Transformer]:
    """A model of a family that we have, in transformers and as ours."""
    model = reference_model(reference_config(family, eos_token_id=None, **options))
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    with tempfile.TemporaryDirectory() as folder:
        return model, load_checkpoint(save(model, Path(folder)), "float32")


def other_config(model_type: str, **options: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(model_type, **sizes | OTHERS.get(model_type, {}) | options)


@functools.cache
def other(model_type: str, **options: Any) -> Any:
    """With eager attention, which knows all that these models do to their logits."""
    model = reference_model(other_config(model_type, **options))
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    return model


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, padding on the left, [B, S] each."""
    longest = max(map(len, rows))
    ids_BS = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask_BS = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids_BS, mask_BS


def generate(
    model: Any, ids_BS: Tensor, mask_BS: Tensor, new: int, cache: Any = None, **options: Any
) -> list[list[int]]:
    """The tokens of an answer. Under the name that the cache has in the version at hand."""
    options = {"do_sample": False} | options
    if cache is not None:
        names = inspect.signature(model.prepare_inputs_for_generation).parameters
        options["cache" if "cache" in names else "past_key_values"] = cache
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out_BS = model.generate(ids_BS, attention_mask=mask_BS, max_new_tokens=new, **options)
    return out_BS[:, ids_BS.shape[1] :].tolist()


class Talk:
    """A conversation with a model of transformers, which is given all of it at every turn."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache
        self.ids_BS = self.mask_BS = torch.empty(0, 0, dtype=torch.int64)

    def say(self, rows: list[list[int]], new: int, **options: Any) -> list[list[int]]:
        ids_BS, mask_BS = padded(rows)
        if self.ids_BS.numel():
            ids_BS = torch.cat((self.ids_BS, ids_BS), dim=1)
            mask_BS = torch.cat((self.mask_BS, mask_BS), dim=1)
        answer = generate(self.model, ids_BS, mask_BS, new, self.cache, **options)
        answer_BS = torch.tensor(answer)
        self.ids_BS = torch.cat((ids_BS, answer_BS), dim=1)
        self.mask_BS = torch.cat((mask_BS, torch.ones_like(answer_BS)), dim=1)
        return answer


def decoder(model: Transformer, eviction: EvictionConfig) -> Decoder:
    return Decoder(model, eviction, compile=False)


def states(cache: InertiaCache | Decoder, row: int) -> list[RowState]:
    slots = cache.slots if isinstance(cache, InertiaCache) else cache.cache
    assert slots is not None
    return set_states(slots, row)


def assert_same_kept(cache: InertiaCache, expected: Decoder, rows: int) -> None:
    """The same positions in every set, and about the same utilities."""
    for row in range(rows):
        for mine, theirs in zip(states(cache, row), states(expected, row), strict=True):
            assert mine.kept == theirs.kept
            torch.testing.assert_close(mine.utility_N, theirs.utility_N, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(mine.k_LGND, theirs.k_LGND, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(mine.v_LGND, theirs.v_LGND, rtol=1e-3, atol=1e-4)
