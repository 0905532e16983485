"""InertiaCache in models that are compiled, or parts of them. What Dynamo traces is run, not compiled on."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from torch import _dynamo

from compile_tests.integrations.hf import Talk, generate, padded, pair, prompts
from inertiakv import EvictionConfig
from inertiakv.integrations.transformers import InertiaCache

RULE = EvictionConfig(budget=16, refresh=4)


@pytest.fixture
def model() -> Iterator[Any]:
    _dynamo.reset()
    yield copy.deepcopy(pair("llama")[0])
    _dynamo.reset()


@pytest.mark.parametrize("part", ["model", "mlp"])
def test_tokens_are_the_same_and_nothing_is_traced_twice(model: Any, part: str) -> None:
    turns = [prompts(60, 33), prompts(21, 9, seed=4)]

    def answers() -> list[list[list[int]]]:
        talk = Talk(model, InertiaCache(model, RULE))
        return [talk.say(rows, 16) for rows in turns]

    expected = answers()
    for module in [model] if part == "model" else [layer.mlp for layer in model.model.layers]:
        module.compile(backend="eager")
    assert answers() == expected
    assert _dynamo.utils.counters["stats"]["unique_graphs"] > 0
    with _dynamo.config.patch(error_on_recompile=True):
        assert answers() == expected


def test_one_graph_is_not_to_be_had(model: Any) -> None:
    model.compile(backend="eager", fullgraph=True)
    with pytest.raises(_dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        generate(model, *padded(prompts(30)), 4, InertiaCache(model, RULE))
    assert model.config._attn_implementation == "sdpa"
