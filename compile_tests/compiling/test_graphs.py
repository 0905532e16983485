"""What is compiled: a graph or two a buffer shape, nothing afterwards, and the same tokens as without."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.tiny import (
    assert_same_state,
    compiled_steps,
    conversation_state,
    fill_with_nan,
    random_prompts,
    spoil_unused_slots,
    tiny_model,
)
from inertiakv import Decoder, EvictionConfig, Sampling
from inertiakv.compiling.graphs import Graphs
from inertiakv.models import Transformer

LAZY = EvictionConfig(compression=0.7, refresh=2)
TWO = replace(LAZY, scorer="value_norm")
"""A graph for steps with refresh, and one for those without."""
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=11)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(layers=3, heads=6, kv_heads=2, dtype=torch.float32)


def addresses(decoder: Decoder) -> list[int]:
    assert decoder.cache is not None
    return [tensor.data_ptr() for tensor in decoder.cache.state_dict().values()]


@pytest.fixture(scope="module")
def compiled(model: Transformer) -> Decoder:
    return Decoder(model, LAZY, compile=True)


@pytest.mark.parametrize("rule, graphs", [(LAZY, ["decode step"]), (TWO, ["decode step", "refresh step"])])
@pytest.mark.usefixtures("nothing_compiled_yet")
def test_the_same_graphs_serve_requests_of_all_lengths_that_fit(
    model: Transformer, rule: EvictionConfig, graphs: list[str]
) -> None:
    """And the first token waits for none of them."""
    compiling: list[str] = []
    compiled, seen = Decoder(model, rule, compile=True, on_compile=compiling.append), set()
    stream = compiled.stream(random_prompts((290, 64)), 4, eos_token_ids=[])
    next(stream)
    assert compiling == []
    assert len(list(stream)) == 3
    for lengths in ((300, 40), (120, 333), (257, 256)):
        prompts = random_prompts(lengths)
        out = compiled.generate(prompts, 12, eos_token_ids=[])
        eager = Decoder(model, rule, compile=False)
        assert out.tokens == eager.generate(prompts, 12, eos_token_ids=[]).tokens
        for row in range(len(prompts)):
            assert_same_state(conversation_state(compiled, row), conversation_state(eager, row), 1e-5)
        stats = out.stats.graphs
        assert (stats.compiled, stats.breaks, stats.recompiles) == (len(graphs), 0, 0)
        seen.add(tuple(addresses(compiled)))
    assert compiling == graphs
    assert len(seen) == 1, "buffers moved from one request to the next"


def test_a_shape_that_comes_back_needs_no_new_graph(compiled: Decoder) -> None:
    counts = []
    for rows in (1, 2, 1, 2):
        stats = compiled.generate(random_prompts([60] * rows), 4, eos_token_ids=[]).stats.graphs
        counts.append(stats.compiled)
    assert counts[1:] == [2, 2, 2]  # one for each number of rows
    assert stats.recompiles == 0


def test_an_answer_is_not_overwritten_by_later_steps(compiled: Decoder) -> None:
    prompts = random_prompts((300, 40))
    first = compiled.generate(prompts, 8, eos_token_ids=[])
    kept = copy.deepcopy(first)
    further = compiled.decode(8, eos_token_ids=[])
    assert (first.tokens, first.stats.sequence_tokens) == (kept.tokens, kept.stats.sequence_tokens)
    whole = compiled.generate(prompts, 16, eos_token_ids=[])
    assert [a + b for a, b in zip(first.tokens, further.tokens, strict=True)] == whole.tokens


def test_sampling_is_the_same_compiled_and_eager() -> None:
    """Sampling sorts, which the compiler leaves to the library: replaying its own loops would not be all."""
    model = tiny_model(heads=6, kv_heads=2, windows=[None, 40], dtype=torch.float32)
    decoders = [Decoder(model, LAZY, compile=compile) for compile in (True, False)]
    prompts = random_prompts((200, 31))
    answers = [decoder.generate(prompts, 12, sampling=SAMPLED, eos_token_ids=[]) for decoder in decoders]
    assert answers[0].tokens == answers[1].tokens
    assert not any(replayed.replays for replayed in compiled_steps(decoders[0]).values())


def test_garbage_in_unused_slots_changes_nothing(compiled: Decoder) -> None:
    prompts = random_prompts((300, 40))
    expected = compiled.generate(prompts, 12, eos_token_ids=[]).tokens
    compiled.generate(prompts, 6, eos_token_ids=[])
    spoil_unused_slots(compiled)
    rest = compiled.decode(6, eos_token_ids=[]).tokens
    assert rest == [row[6:] for row in expected]

    fill_with_nan(compiled)
    assert compiled.generate(prompts, 12, eos_token_ids=[]).tokens == expected


@pytest.mark.slow
def test_flex_compiled_agrees_with_dense() -> None:
    model = tiny_model(heads=14, kv_heads=2, windows=[None, 40], dtype=torch.float32)
    prompts = random_prompts((300, 50, 129))
    runs = {}
    for attention in ("dense", "flex"):
        decoder = Decoder(model, LAZY, compile=attention == "flex", attention=attention, prefill_chunk=150)
        runs[attention] = decoder.generate(prompts, 12, eos_token_ids=[])
    assert runs["dense"].tokens == runs["flex"].tokens
    graphs = runs["flex"].stats.graphs
    assert (graphs.compiled, graphs.recompiles) == (2, 0)  # a step, and a prompt chunk


def tokens_of(model: torch.nn.Module, *, compile: bool) -> list[list[int]]:
    decoder = Decoder(model, EvictionConfig(budget=30, refresh="once"), compile=compile)
    return decoder.generate(random_prompts((50,)), 6, eos_token_ids=[]).tokens


class Unlike(torch.nn.Module):
    """A layer that is attention alone, and not the same as any other."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x_BTE: Tensor, rotary: Any, cache: Any) -> Tensor:
        q_BHTD = x_BTE.unflatten(-1, (3, 8)).transpose(1, 2)
        out_BHTD = cache.attend(q_BHTD, q_BHTD, q_BHTD, window=None, scale=0.3)
        return x_BTE + out_BHTD.transpose(1, 2).flatten(2) / (1 + self.index)


@pytest.mark.slow
def test_layers_that_are_all_unlike_can_be_compiled() -> None:
    """Of regions that differ the compiler takes no more than 8, unless it is told to."""
    model = tiny_model(layers=9, heads=3, kv_heads=3, dtype=torch.float32)
    model.layers = torch.nn.ModuleList(map(Unlike, range(9)))
    assert tokens_of(model, compile=True) == tokens_of(model, compile=False)


def tie(layer: torch.nn.Module) -> None:
    layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight


@pytest.mark.parametrize("tied", [0, 2])
def test_a_tie_within_one_layer_alone_is_refused(tied: int) -> None:
    model = tiny_model(layers=3, dtype=torch.float32)
    tie(model.layers[tied])
    message = r"mlp.gate_proj.weight and mlp.up_proj.weight as one tensor.*compile=False"
    with pytest.raises(ValueError, match=message):
        Decoder(model, LAZY, compile=True)
    Decoder(model, LAZY, compile=False)


@pytest.mark.slow
def test_layers_may_be_tied_within_themselves_all_alike() -> None:
    model = tiny_model(layers=3, dtype=torch.float32)
    for layer in model.layers:
        tie(layer)
    assert tokens_of(model, compile=True) == tokens_of(model, compile=False)


def test_any_number_of_shapes_can_be_compiled() -> None:
    def double(x: Tensor, *, times: int) -> Tensor:
        return x * times

    graphs = Graphs(enabled=True, device=torch.device("cpu"))
    limit = torch._dynamo.config.recompile_limit
    for size in range(1, limit + 3):
        assert (
            graphs.run(("double", size), double, torch.ones(size), capture=False, times=2).sum() == 2 * size
        )
    assert (graphs.stats.compiled, graphs.stats.recompiles) == (limit + 2, 0)
