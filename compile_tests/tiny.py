"""Tiny random models for tests of the method, and views of a decoder's cache that do not depend on slots.

Shapes: L layers, G KV heads, N tokens kept, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inertiakv import Decoder, EvictionConfig
from inertiakv.attention.forward_state import ForwardState
from inertiakv.cache.slot_cache import CacheShape, SlotCache
from inertiakv.compiling.fingerprint import fingerprint
from inertiakv.compiling.graphs import Graphs
from inertiakv.compiling.replay import Replayed
from inertiakv.decoding.batch import BatchState
from inertiakv.decoding.decoding_rule import DecodingRule
from inertiakv.decoding.forward import ForwardPass
from inertiakv.decoding.steps import decode_step
from inertiakv.models import ModelConfig, Transformer, parse_config
from inertiakv.scoring.scorers import Evidence, random

VOCAB = 61


def tiny_model(
    seed: int = 0,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    windows: Sequence[int | None] | None = None,
    dtype: torch.dtype = torch.float64,
    max_positions: int = 4096,
    hidden: int = 24,
    head_dim: int = 8,
) -> Transformer:
    """A random Llama, or with `windows` (one a layer) a Mistral. No two of its sizes are equal, and attention
    is far from flat. It has no end-of-sequence token."""
    raw: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    sliding = {window for window in windows or () if window is not None}
    if sliding:
        assert windows is not None
        assert len(sliding) == 1, "one window size a model"
        raw |= {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": sliding.pop(),
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        }
    return random_model(parse_config(raw), seed, dtype)


def random_model(config: ModelConfig, seed: int, dtype: torch.dtype) -> Transformer:
    """The same parameters, up to rounding, in every dtype."""
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif "embed" in name or "lm_head" in name:
            parameter.data.normal_(0.0, 1.0, generator=generator)
        else:
            parameter.data.normal_(0.0, 0.35, generator=generator)
    return model.to(dtype)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [random_prompt(length, seed=row) for row, length in enumerate(lengths)]


def decoder_for(model: Transformer, eviction: EvictionConfig | None, **options: Any) -> Decoder:
    """A decoder that runs eagerly, unless `options` say otherwise."""
    return Decoder(model, eviction, **({"compile": False} | options))


@dataclass(frozen=True)
class RowState:
    """What a cache holds of one row in one retention set, oldest position first: for these layers and KV
    heads."""

    layers: list[int]
    heads: list[int]
    kept: list[int]
    utility_N: Tensor
    k_LGND: Tensor
    v_LGND: Tensor

    def utility(self) -> dict[int, float]:
        return dict(zip(self.kept, self.utility_N.tolist(), strict=True))


def set_states(cache: SlotCache, row: int = 0) -> list[RowState]:
    """All retention sets of a row."""
    every_layer, every_head = list(range(cache.shape.layers)), list(range(cache.shape.kv_heads))
    states = []
    for index, table in enumerate(cache.retention):
        layers = every_layer if len(cache.retention) == 1 and cache.shape.scope == "shared" else [index]
        sets = table.position_BXN.shape[1]
        for x in range(sets):
            heads = every_head if cache.shape.scope != "head" else [x]
            position_N, count = table.position_BXN[row, x], int(table.count_BX[row, x])
            assert len(position_N[position_N >= 0].unique()) == count, "a position has two slots"
            slot_N = position_N.argsort()[len(position_N) - count :]
            k_LGND, v_LGND = (
                torch.stack([getattr(cache.layers[i], name)[row, heads][:, slot_N] for i in layers])
                for name in ("k_BGND", "v_BGND")
            )
            kept, utility_N = position_N[slot_N].tolist(), table.utility_BXN[row, x, slot_N]
            states.append(RowState(layers, heads, kept, utility_N, k_LGND, v_LGND))
    return states


def row_state(cache: SlotCache, row: int = 0) -> RowState:
    """The set that all layers of a row share."""
    (state,) = set_states(cache, row)
    return state


def assert_same_state(actual: RowState, expected: RowState, tolerance: float = 0.0) -> None:
    """Equal positions; utilities, K and V equal up to `tolerance`."""
    assert actual.kept == expected.kept
    for mine, theirs in (
        (actual.utility_N, expected.utility_N),
        (actual.k_LGND, expected.k_LGND),
        (actual.v_LGND, expected.v_LGND),
    ):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def conversation_state(decoder: Decoder, row: int = 0) -> RowState:
    assert decoder.cache is not None
    return row_state(decoder.cache, row)


class Spy:
    """A model that remembers the tokens and positions it was called with."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.tokens: list[list[list[int]]] = []
        self.positions: list[list[list[int]]] = []

    def __call__(self, tokens_BT: Tensor, positions_BT: Tensor, cache: Any) -> Tensor:
        self.tokens.append(tokens_BT.tolist())
        self.positions.append(positions_BT.tolist())
        return self.model(tokens_BT, positions_BT, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def spoil_unused_slots(decoder: Decoder) -> None:
    """Fill every slot that holds no token: NaN as K, large numbers as V."""
    cache = decoder.cache
    assert cache is not None
    for index, layer in enumerate(cache.layers):
        table = cache.sets_of(index)
        unused_BGN = (table.position_BXN < 0).expand(-1, layer.k_BGND.shape[1], -1)
        layer.k_BGND[unused_BGN] = torch.nan
        layer.v_BGND[unused_BGN] = 1e30


def fill_with_nan(decoder: Decoder) -> None:
    """Spoil a cache for the next request, which must not see what it finds in its buffers."""
    assert decoder.cache is not None
    for layer in decoder.cache.layers:
        layer.k_BGND.fill_(torch.nan)
        layer.v_BGND.fill_(torch.nan)


# The core's private names. All tests reach them through what follows.

KVZIP_CHUNK = "inertiakv.scoring.kvzip.CHUNK"
"""How many tokens of a prompt are repeated at a time."""


def prompt_logits(decoder: Decoder) -> Tensor:
    """Logits [B, V] of the tokens that follow the prompts, before the answer begins."""
    logits_BV = decoder._current().logits_BV
    assert logits_BV is not None
    return logits_BV


def run_steps(decoder: Decoder, number: int) -> None:
    """Greedy decode steps whose tokens are not read."""
    for _ in range(number):
        decoder._current().run_step(greedy=True)


def compiled_steps(decoder: Decoder) -> dict[str, Replayed]:
    """The compiled steps of the cache there is, by what they are for."""
    assert decoder.cache is not None
    shape = decoder.cache.shape
    return {key[0]: replayed for key, replayed in decoder.graphs._compiled.items() if shape in key}


def replayed_calls(decoder: Decoder, name: str) -> list[tuple[Any, Any]]:
    """The loops that replaying a compiled step calls, and their arguments."""
    calls = compiled_steps(decoder)[name]._calls
    assert calls is not None
    return list(calls)


def step_fingerprint(decoder: Decoder) -> str:
    state = (decoder.model, decoder.cache, decoder.batch, decoder.rule)
    return fingerprint(decode_step, state)


def attend_in_layers(
    cache: SlotCache, positions_BT: Tensor, qkv: tuple[Tensor, Tensor, Tensor], windows: Sequence[int | None]
) -> Tensor:
    """Attention of new tokens, with the same q, k and v in every layer: [L, B, H, T, D]."""
    slots_BT = cache.most_B[:, None] + torch.arange(positions_BT.shape[1])
    state = ForwardState(positions_BT, slots_BT, "dense", windows=tuple(dict.fromkeys(windows)))
    forward = ForwardPass(cache, state)

    def attend(q_BHTD: Tensor, layer: Any, window: int | None) -> Tensor:
        return layer.attend(*qkv, window=window, scale=0.01)

    outputs = [
        forward.run_layer(index, lambda q, layer, window=window: attend(q, layer, window), qkv[0])
        for index, window in enumerate(windows)
    ]
    return torch.stack(outputs)


def random_scores(
    config: EvictionConfig, layers: int, layer: int, head: int, query: int, positions: list[int]
) -> list[float]:
    """What scorer "random" gives to tokens at these positions, at the query's."""
    rule = DecodingRule(config, layers, (None,), "dense", torch.float64, torch.device("cpu"))
    if layer not in rule.coefficients():
        return [0.0] * len(positions)
    position_BXN, kv = torch.tensor(positions)[None, None].expand(1, head + 1, -1), torch.zeros(1).double()
    state = ForwardState(torch.tensor([[query]]), None, "dense", (None,), position_BXN=position_BXN)
    evidence = Evidence(state, kv, kv, kv, 1.0, salt=rule.coefficients()[layer].salt)
    return random(evidence)[0, head].tolist()


@dataclass(frozen=True)
class Step:
    """A decode step and all that it works on, with an empty cache."""

    model: Transformer
    cache: SlotCache
    batch: BatchState
    rule: DecodingRule

    @classmethod
    def make(
        cls,
        model: Transformer,
        rule: EvictionConfig,
        batch: int,
        slots: int,
        device: torch.device,
        backend: str,
    ) -> Step:
        config = model.config
        shape = CacheShape(config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)
        how = (config.num_layers, config.windows, backend, model.dtype, device)
        return cls(
            model,
            SlotCache(shape, dtype=model.dtype, device=device),
            BatchState(batch, device),
            DecodingRule(rule, *how, tp=model.tp),  # type: ignore[arg-type]
        )

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        return self.model, self.cache, self.batch, self.rule

    def run(self, graphs: Graphs, *, refresh: bool, greedy: bool) -> None:
        args = (self.model, self.cache, self.batch, self.rule, None)
        graphs.run(("step",), decode_step, *args, scores=refresh, greedy=greedy)
