"""Memory: what caches take, when they give it back, and that nothing grows with prompt times prompt."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compile_tests.tiny import decoder_for, prompt_logits, random_prompt, tiny_model
from inertiakv import EvictionConfig
from inertiakv.cache import memory
from inertiakv.cache.slot_cache import CacheShape, LayerCache, SlotCache, bucket

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 8


def cache_bytes(slots: int, rows: int = 1) -> int:
    return 2 * LAYERS * rows * KV_HEADS * slots * HEAD_DIM * 4


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of K and V held by all caches, after every change."""
    history = [0]

    def watch(name: str) -> None:
        original = getattr(LayerCache, name)

        def watched(self: LayerCache) -> None:
            before = self.k_BGND.numel()
            original(self)
            change = (self.k_BGND.numel() - before) * 2 * self.k_BGND.element_size()
            history.append(history[-1] + change)

        monkeypatch.setattr(LayerCache, name, watched)

    watch("allocate")
    watch("release")
    return history


def test_the_prompt_cache_is_given_back_layer_by_layer(held: list[int]) -> None:
    decoder = decoder_for(tiny_model(layers=LAYERS, dtype=torch.float32), EvictionConfig(compression=0.9))
    out = decoder.generate(random_prompt(2000), 20, eos_token_ids=[])
    prompt, kept = cache_bytes(bucket(2001)), cache_bytes(bucket(201))
    assert max(held) == prompt + kept // LAYERS
    assert held[-1] == out.stats.cache_bytes == kept
    assert out.stats.full_cache_bytes == cache_bytes(bucket(2000 + 20))
    assert out.stats.kept_tokens == [200]


def test_while_a_draft_is_written_both_caches_are_held(held: list[int]) -> None:
    rule = EvictionConfig(compression=0.9, draft=30, drafts=2)
    decoder = decoder_for(tiny_model(layers=LAYERS, dtype=torch.float32), rule)
    out = decoder.generate(random_prompt(2030), 20, eos_token_ids=[])
    prompt, kept = cache_bytes(bucket(2030 + 30 + 1)), cache_bytes(bucket(204))
    assert max(held) == prompt + kept
    assert held[-1] == out.stats.cache_bytes == kept


def test_the_formula_is_what_is_allocated() -> None:
    for rows, slots, dtype in ((1, 128, torch.float32), (3, 640, torch.bfloat16)):
        shape = CacheShape(LAYERS, rows, KV_HEADS, slots, HEAD_DIM)
        cache = SlotCache(shape, dtype=dtype, device="cpu")
        assert cache.allocated_bytes == shape.nbytes(dtype)
        assert shape.nbytes(dtype) == cache_bytes(slots, rows) * dtype.itemsize // 4


@pytest.mark.parametrize("eviction", [None, EvictionConfig(budget=400)])
def test_a_prompt_within_the_budget_is_read_straight_into_the_decode_cache(
    held: list[int], eviction: EvictionConfig | None
) -> None:
    decoder = decoder_for(tiny_model(layers=LAYERS, dtype=torch.float32), eviction)
    out = decoder.generate(random_prompt(300), 50, eos_token_ids=[])
    assert max(held) == held[-1] == out.stats.cache_bytes == cache_bytes(bucket(351))
    assert not out.stats.evicted


def test_too_little_memory_is_an_error_before_any_work(
    held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_for(tiny_model(layers=LAYERS, dtype=torch.float32), EvictionConfig())
    expected = decoder.generate(random_prompt(300), 9, eos_token_ids=[]).tokens[0]
    start = decoder.generate(random_prompt(300), 2, eos_token_ids=[]).tokens[0]
    count = len(held)
    with monkeypatch.context() as little:
        little.setattr(memory, "available_bytes", lambda device: 100_000)
        with pytest.raises(MemoryError, match=r"needs .* GiB on cpu \(prompt cache .*\), but only 0.00 GiB"):
            decoder.generate(random_prompt(2000), 2)
    assert len(held) == count
    assert start + decoder.decode(7, eos_token_ids=[]).tokens[0] == expected


@pytest.mark.parametrize(
    "eviction", [None, EvictionConfig(budget=50, evict_at="prompt", window=8, after="none", refresh=1)]
)
def test_too_little_memory_for_a_turn_or_an_answer_leaves_the_conversation(
    eviction: EvictionConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_for(tiny_model(layers=LAYERS, dtype=torch.float32), eviction)
    expected = decoder.generate(random_prompt(300), 9, eos_token_ids=[]).tokens[0]
    start = decoder.generate(random_prompt(300), 2, eos_token_ids=[]).tokens[0]
    with monkeypatch.context() as little:
        little.setattr(memory, "available_bytes", lambda device: 100_000)
        for act in (
            lambda: decoder.extend(random_prompt(2000)),
            lambda: decoder.decode(2000),
            lambda: decoder.stream_answer(2000),
        ):
            with pytest.raises(MemoryError, match=r"needs .* GiB on cpu"):
                act()
    assert start + decoder.decode(7, eos_token_ids=[]).tokens[0] == expected


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= tensor.nbytes:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_prefill_makes_nothing_of_the_size_of_queries_times_slots() -> None:
    tokens = 6000
    model = tiny_model(layers=1, dtype=torch.float32, max_positions=8192)
    decoder = decoder_for(model, EvictionConfig(), prefill_chunk=2048)
    with Largest() as largest:
        decoder.prefill(random_prompt(tokens), max_new_tokens=1)
    assert prompt_logits(decoder).shape[0] == 1, "logits of the last token alone"
    assert largest.elements < 2048 * tokens / 4
