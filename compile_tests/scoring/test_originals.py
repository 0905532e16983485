"""Named policies against the papers that they are called after, each written out here from its paper's text.

A token's scores and the kept sets of every layer and KV head, on tiny random models, in plain loops over
lists of positions; nothing is shared with the implementation but the model's weights.

Shapes: T queries, H query heads, G KV heads, N tokens, D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from numpy.linalg import norm
from torch import Tensor

from compile_tests.oracle import Oracle
from compile_tests.oracle_rules import Key
from compile_tests.tiny import KVZIP_CHUNK, decoder_for, random_prompt, set_states, tiny_model
from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.models import Transformer

cached_model = functools.lru_cache(maxsize=None)(tiny_model)

HEADS = [(4, 2), (3, 3), (3, 1)]
Score = dict[int, float]
Kept = dict[tuple[int, int], set[int]]


@dataclass
class Layer:
    """What a layer has seen: each token's K and V [G, N, D], queries [H, N, D] before and after RoPE, and the
    attention that each query paid, [H, N, N]."""

    model: Transformer
    q_HND: Tensor
    k_GND: Tensor
    v_GND: Tensor
    attention_HNN: Tensor
    plain_q_HND: Tensor

    @property
    def group(self) -> int:
        return len(self.q_HND) // len(self.k_GND)


class Whole:
    """One sequence through the model, with causal attention to everything."""

    def __init__(self, model: Transformer, tokens: list[int]) -> None:
        self.layers: list[Layer] = []
        plain: list[Tensor] = []
        hooks = [
            module.register_forward_hook(lambda module, args, out: plain.append(out[0]))
            for name, module in model.named_modules()
            if name.endswith("q_proj")
        ]
        self.model, self.plain = model, plain
        with torch.no_grad():
            model(torch.tensor([tokens]), torch.arange(len(tokens))[None], self)
        for hook in hooks:
            hook.remove()

    def run_layer(self, index: int, layer: Any, x_BTE: Tensor, rotary: Any) -> Tensor:
        return layer(x_BTE, rotary, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        logits_HNN = q[0] @ k[0].repeat_interleave(group, 0).mT / math.sqrt(q.shape[-1])
        logits_HNN = logits_HNN.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        attention_HNN = logits_HNN.softmax(-1)
        plain_HND = self.plain[-1].unflatten(-1, (q.shape[1], -1)).transpose(0, 1)
        self.layers.append(Layer(self.model, q[0], k[0], v[0], attention_HNN, plain_HND))
        return (attention_HNN @ v[0].repeat_interleave(group, 0))[None]


def kept_by(decoder: Decoder, row: int = 0) -> Kept:
    assert decoder.cache is not None
    return {
        (layer, head): set(state.kept)
        for state in set_states(decoder.cache, row)
        for layer in state.layers
        for head in state.heads
    }


def scores_of(decoder: Decoder, row: int = 0) -> dict[tuple[int, int], Score]:
    assert decoder.cache is not None
    return {(s.layers[0], s.heads[0]): s.utility() for s in set_states(decoder.cache, row)}


def best(score: Score, number: int) -> set[int]:
    """The positions of the largest scores, of equals the newer ones."""
    return set(sorted(score, key=lambda position: (score[position], position), reverse=True)[:number])


# Methods that evict at every decode step


class Stepwise(Oracle):
    """A sequence whose layers and KV heads each keep tokens of their own, by a paper's rule."""

    def __init__(self, model: Transformer, budget: int, rule: Callable[[Stepwise, int, int], Score]) -> None:
        super().__init__(model, None)
        self.budget, self.paper = budget, rule
        self.worth: dict[Key, Score] = {}  # what the paper's rule said at the last step
        self.sums: dict[Key, Score] = {}
        self.group = model.config.num_heads // model.config.num_kv_heads

    def feed(self, token: int) -> int:
        """The token that follows."""
        logits_V, self.attention = self._forward(token)  # the last query's, by layer and query head
        return int(logits_V.argmax())

    def evict(self, kept: Kept) -> None:
        """Evict down to budget the lowest of what the rule says. `kept` are to be these; it decides between
        equals, of which the papers say nothing and rounding makes some."""
        assert kept.keys() == self.k.keys()
        self.worth = {(layer, head): self.paper(self, layer, head) for layer, head in self.k}
        for at, score in self.worth.items():
            assert len(kept[at]) == self.budget
            gone = set(score) - kept[at]
            assert min(score[i] for i in kept[at]) >= max(score[i] for i in gone) - 1e-12
            for position in gone:
                del self.k[at][position], self.v[at][position]

    def mean_attention(self, layer: int, heads: range) -> Score:
        rows = [self.attention[layer][h] for h in heads]
        return {p: sum(row[p] for row in rows) / len(rows) for p in rows[0]}

    def of_group(self, head: int) -> range:
        return range(head * self.group, (head + 1) * self.group)


def tova(at: Stepwise, layer: int, head: int) -> Score:
    """TOVA: the newest query's attention weights, averaged over the layer's heads; the lowest goes."""
    return at.mean_attention(layer, range(at.model.config.num_heads))


def keydiff(at: Stepwise, layer: int, head: int) -> Score:
    """KeyDiff: the anchor is the mean of the normalised keys; keys most similar to it go."""
    keys = at.k[layer, head]
    anchor = sum(k / norm(k) for k in keys.values()) / len(keys)
    return {p: -float(k @ anchor / (norm(k) * norm(anchor))) for p, k in keys.items()}


def key_norm(at: Stepwise, layer: int, head: int) -> Score:
    """L2 norm: keys of the highest norm go."""
    return {p: -float(norm(k)) for p, k in at.k[layer, head].items()}


def streaming(at: Stepwise, layer: int, head: int) -> Score:
    """StreamingLLM: the first four tokens and the newest ones stay."""
    return {p: math.inf if p < 4 else p for p in at.k[layer, head]}


def heavy_hitters(at: Stepwise, layer: int, head: int) -> Score:
    """H2O: half of the budget for the newest, the rest for the largest sums of attention."""
    return _summed(at, layer, head, at.mean_attention(layer, at.of_group(head)))


def scissorhands(at: Stepwise, layer: int, head: int) -> Score:
    """Scissorhands: tokens whose attention is seldom above the mean go, but not the newest."""
    rows = [at.attention[layer][h] for h in at.of_group(head)]
    above = {p: sum(row[p] > 1 / len(row) for row in rows) / len(rows) for p in rows[0]}
    return _summed(at, layer, head, above)


def _summed(at: Stepwise, layer: int, head: int, score: Score) -> Score:
    sums = at.sums.setdefault((layer, head), {})
    for position, value in score.items():
        sums[position] = sums.get(position, 0.0) + value
    newest = at.budget // 2
    return {p: math.inf if p > at.length - 1 - newest else sums[p] for p in at.k[layer, head]}


@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize(
    "name,rule",
    [
        ("tova", tova),
        ("keydiff", keydiff),
        ("knorm", key_norm),
        ("streaming_llm", streaming),
        ("h2o", heavy_hitters),
        ("scissorhands", scissorhands),
    ],
)
def test_rules_of_every_step_keep_what_their_papers_keep(
    name: str, rule: Callable[[Stepwise, int, int], Score], heads: int, kv_heads: int
) -> None:
    model = cached_model(3, layers=2, heads=heads, kv_heads=kv_heads)
    prompt, budget = random_prompt(40, 7), 13
    decoder = decoder_for(model, policy(name, budget=budget))
    decoder.prefill(prompt, max_new_tokens=30)
    theirs = Stepwise(model, budget, rule)
    token = [theirs.feed(token) for token in prompt][-1]
    assert decoder.decode(1).tokens == [[token]]
    for _ in range(25):
        token = theirs.feed(token)
        assert decoder.decode(1).tokens == [[token]]
        theirs.evict(kept_by(decoder))
    if name in ("tova", "keydiff", "knorm"):  # where the scores of a step are the utilities
        for at, utility in scores_of(decoder).items():
            expected, bits = theirs.worth[at], 1e-9 if name != "knorm" else 2**-14
            assert utility == pytest.approx({p: expected[p] for p in utility}, rel=bits)


# Methods that evict the prompt before the first decode step


def votes(layer: Layer, head: int, window: int) -> Score:
    """SnapKV: the attention that the last `window` queries pay to each token before them, summed; with
    grouped queries the mean over the heads of the group."""
    length = layer.k_GND.shape[1]
    heads = range(head * layer.group, (head + 1) * layer.group)
    return {
        i: sum(float(layer.attention_HNN[h, length - window :, i].sum()) for h in heads) / layer.group
        for i in range(length - window)
    }


def clustered(vote: Score, kernel: int) -> Score:
    """SnapKV: max pooling, so that neighbours of an important token stay with it."""
    near = kernel // 2
    return {i: max(vote[j] for j in range(i - near, i + near + 1) if j in vote) for i in vote}


def prompt_decoder(
    model: Transformer, name: str, prompt: list[int], *, changes: dict[str, Any] | None = None, **options: Any
) -> Decoder:
    decoder = decoder_for(model, policy(name, **(changes or {})), **options)
    decoder.prefill(prompt)
    return decoder


@pytest.mark.parametrize("heads,kv_heads", HEADS)
def test_snapkv(heads: int, kv_heads: int) -> None:
    model, prompt, budget = cached_model(1, heads=heads, kv_heads=kv_heads), random_prompt(120, 1), 50
    decoder = prompt_decoder(model, "snapkv", prompt, changes={"budget": budget})
    kept, scores = kept_by(decoder), scores_of(decoder)
    for index, layer in enumerate(Whole(model, prompt).layers):
        for head in range(kv_heads):
            vote = votes(layer, head, 32)
            chosen = best(clustered(vote, 7), budget - 32)
            assert kept[index, head] == chosen | set(range(88, 120))
            mine = {i: 32 * scores[index, head][i] for i in chosen}
            assert mine == pytest.approx({i: vote[i] for i in chosen}, rel=1e-9)


def arithmetic_sequence(free: float, beta: float, num_layers: int) -> list[float]:
    """PyramidKV: k_last = total / (beta * layers), k_first = 2 * total / layers - k_last, a straight line."""
    last = free / beta
    first = 2 * free - last
    return [first - (first - last) / (num_layers - 1) * layer for layer in range(num_layers)]


@pytest.mark.parametrize("budget", [30, 41, 60])
def test_pyramidkv(budget: int) -> None:
    layers = 4
    model, prompt = cached_model(2, layers=layers), random_prompt(150, 2)
    decoder = prompt_decoder(model, "pyramidkv", prompt, changes={"budget": budget})
    kept = kept_by(decoder)
    line = arithmetic_sequence(budget - 8, 20, layers)
    sizes = [len(kept[layer, 0]) - 8 for layer in range(layers)]
    assert sum(sizes) == layers * (budget - 8)
    assert all(abs(size - free) < 1 for size, free in zip(sizes, line, strict=True))
    for index, layer in enumerate(Whole(model, prompt).layers):
        for head in range(2):
            chosen = best(clustered(votes(layer, head, 8), 7), sizes[index])
            assert kept[index, head] == chosen | set(range(142, 150))


@pytest.mark.parametrize("heads,kv_heads", HEADS)
def test_adakv(heads: int, kv_heads: int) -> None:
    model, prompt, budget = cached_model(4, heads=heads, kv_heads=kv_heads), random_prompt(130, 4), 52
    kept = kept_by(prompt_decoder(model, "adakv", prompt, changes={"budget": budget}))
    for index, layer in enumerate(Whole(model, prompt).layers):
        scores = [clustered(votes(layer, head, 32), 7) for head in range(kv_heads)]
        assert_adakv(
            scores, [kept[index, head] - set(range(98, 130)) for head in range(kv_heads)], budget - 32
        )


def assert_adakv(scores: list[Score], kept: list[set[int]], budget: int) -> None:
    """AdaKV: the largest scores of all heads together say how much of the budget each head gets, of which a
    fifth is then given to all heads alike; each head keeps its own best."""
    every = [(score, head, i) for head, of_head in enumerate(scores) for i, score in of_head.items()]
    largest = sorted(every, reverse=True)[: budget * len(scores)]
    # Pooled scores are often equal: whose goes then is no matter of the paper.
    numbers = [sum(head == h for _, h, _ in largest) for head in range(len(scores))]
    assert sum(map(len, kept)) == budget * len(scores)
    for score, mine, number in zip(scores, kept, numbers, strict=True):
        assert abs(len(mine) - (0.8 * number + 0.2 * budget)) < 1.0001
        worst = min(score[i] for i in mine)
        assert all(score[i] <= worst for i in set(score) - mine)


# Expected attention


def mean_rotation(model: Transformer, first: int, number: int) -> Tensor:
    """The mean of RoPE's matrices [D, D] at these positions: pair i is turned by position * theta^(-2i/D)."""
    size, pairs = model.config.head_dim, model.config.head_dim // 2
    total = torch.zeros(size, size, dtype=torch.float64)
    for position in range(first, first + number):
        for i in range(pairs):
            # A model's frequencies are float32 numbers.
            frequency = torch.tensor(model.config.rope.theta ** (-2 * i / size), dtype=torch.float32)
            angle = position * float(frequency)
            total[i, i] += math.cos(angle)
            total[i + pairs, i + pairs] += math.cos(angle)
            total[i, i + pairs] -= math.sin(angle)
            total[i + pairs, i] += math.sin(angle)
    return total / number


def expected(layer: Layer, head: int, queries: range, following: int) -> Score:
    """Expected attention: z_i = exp(mu . k_i / sqrt(d) + k_i . Sigma k_i / (2 d)) over its sum, with the mean
    and covariance of queries before RoPE, turned by the mean rotation of the next 512 positions; the mean
    over the group's heads, times the norm of the value. The first four tokens are left out."""
    rotation = mean_rotation(layer.model, following, 512)
    size, length = layer.k_GND.shape[-1], layer.k_GND.shape[1]
    total = dict.fromkeys(range(4, length), 0.0)
    for h in range(head * layer.group, (head + 1) * layer.group):
        seen = layer.plain_q_HND[h, [t for t in queries if t >= 4]]
        mean, covariance = rotation @ seen.mean(0), rotation @ torch.cov(seen.T, correction=0) @ rotation.T
        z = {}
        for i in total:
            k = layer.k_GND[head, i]
            z[i] = math.exp(float(mean @ k) / math.sqrt(size) + float(k @ covariance @ k) / (2 * size))
        for i in total:
            norm = float(layer.v_GND[head, i].norm())
            total[i] += z[i] / sum(z.values()) * norm / layer.group
    return total


@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("window", [512, 20])
def test_adakv_with_expected_attention(heads: int, kv_heads: int, window: int) -> None:
    model, prompt, budget = cached_model(5, heads=heads, kv_heads=kv_heads), random_prompt(90, 5), 24
    decoder = prompt_decoder(model, "adakv_ea", prompt, changes={"budget": budget, "window": window})
    kept, mine = kept_by(decoder), scores_of(decoder)
    for index, layer in enumerate(Whole(model, prompt).layers):
        queries = range(max(0, 90 - window), 90)
        scores = [expected(layer, head, queries, 90) for head in range(kv_heads)]
        assert_adakv(scores, [kept[index, head] - set(range(4)) for head in range(kv_heads)], budget - 4)
        for head, score in enumerate(scores):
            assert set(range(4)) <= kept[index, head]
            expected_score = {i: score.get(i, max(score.values())) for i in kept[index, head]}
            assert mine[index, head] == pytest.approx(expected_score, rel=1e-6)


def test_any_rule_takes_expected_attention() -> None:
    """One set for all layers, in the first decode step: its query is one more of the window's."""
    model, prompt = cached_model(6, layers=2), random_prompt(70, 6)
    options: dict[str, Any] = {"scorer": "expected_attention", "window": 16, "refresh": "once"}
    decoder = decoder_for(model, EvictionConfig(budget=20, aggregation="cumulative", **options))
    answer = decoder.generate(prompt, 2).tokens[0]
    layers = Whole(model, [*prompt, answer[0]]).layers
    scores = [expected(layer, head, range(54, 71), 71) for layer in layers for head in range(2)]
    total = {i: sum(score[i] for score in scores) / 2 for i in range(4, 71)}
    worth = total | dict.fromkeys(range(4), sum(max(score.values()) for score in scores) / 2)
    assert kept_by(decoder)[0, 0] == best(worth, 20)


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"window": 0}, "evict_at='prompt' scores queries of the prompt"),
        ({"window": 0, "evict_at": "first_step"}, "needs queries of the prompt: give window"),
        ({"refresh": 2}, "scores the prompt alone: give refresh='once'"),
    ],
)
def test_expected_attention_needs_queries(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        policy("adakv_ea", **changes)


def test_expected_attention_needs_the_rotation_of_the_model() -> None:
    model = tiny_model(0)
    del model.rotary
    with pytest.raises(ValueError, match=r"it needs a model that offers `model\.rotary"):
        Decoder(model, policy("adakv_ea"), compile=False)


# KVzip


def reconstruction(
    model: Transformer, entered: list[int], chunk: range, repeated: list[int], heads: range
) -> dict[tuple[int, int], Score]:
    """KVzip: the most attention that each token of a chunk gets from any query that repeats it, and any head
    of its group; softmax over the sinks, the chunk and the queries' own tokens, causally."""
    scores = {}
    length = len(entered)
    for index, layer in enumerate(Whole(model, [*entered, *repeated]).layers):
        for head in heads:
            most = dict.fromkeys(chunk, 0.0)
            for t in range(length, length + len(repeated)):
                keys = [*(i for i in range(4) if i < chunk.start), *chunk, *range(length, t + 1)]
                for h in range(head * layer.group, (head + 1) * layer.group):
                    logits = layer.k_GND[head, keys] @ layer.q_HND[h, t] / math.sqrt(layer.k_GND.shape[-1])
                    weights = dict(zip(keys, logits.softmax(-1).tolist(), strict=True))
                    most = {i: max(most[i], weights[i]) for i in chunk}
            scores[index, head] = most
    return scores


def zipped(model: Transformer, prompt: list[int], size: int, prefix: list[int], heads: int) -> Any:
    """The scores of a whole prompt, repeated by chunks of this size."""
    scores: dict[tuple[int, int], Score] = {}
    for start in range(0, len(prompt), size):
        chunk = range(start, min(len(prompt), start + size))
        repeated = [*prefix, *prompt[max(0, start - 8) : start], *prompt[start : chunk.stop]]
        for at, score in reconstruction(model, prompt, chunk, repeated, range(heads)).items():
            scores[at] = scores.get(at, {}) | score
    return scores


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(KVZIP_CHUNK, 17)
    return 17


@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("prefix", [[], [5, 3, 9]], ids=["alone", "instructed"])
def test_kvzip(heads: int, kv_heads: int, prefix: list[int], small_chunks: int) -> None:
    model, prompt, budget = cached_model(8, heads=heads, kv_heads=kv_heads), random_prompt(45, 8), 15
    scores = zipped(model, prompt, small_chunks, prefix, kv_heads)

    decoder = prompt_decoder(model, "kvzip", prompt, changes={"budget": budget}, repeat_prefix=prefix)
    kept, mine = kept_by(decoder), scores_of(decoder)
    every = [(value, at, i) for at, score in scores.items() for i, value in score.items() if i >= 4]
    chosen = sorted(every, reverse=True)[: (budget - 4) * len(scores)]
    for at, score in scores.items():
        assert kept[at] == {i for _, where, i in chosen if where == at} | set(range(4))
        assert mine[at] == pytest.approx({i: score[i] for i in kept[at]}, rel=1e-9)

    changes = {"budget": budget, "allocation": "uniform"}
    kept = kept_by(prompt_decoder(model, "kvzip", prompt, changes=changes, repeat_prefix=prefix))
    for at, score in scores.items():
        assert kept[at] == best({i: score[i] for i in range(4, 45)}, budget - 4) | set(range(4))


def test_a_head_may_keep_nothing() -> None:
    """Without sinks nothing is left to a head whose tokens are worth less than all others: it sees the new
    token alone."""
    model, prompt = cached_model(8), random_prompt(45, 8)
    decoder = decoder_for(model, policy("kvzip", budget=1, sinks=0))
    decoder.generate(prompt, 10)
    sizes = [len(kept) for kept in kept_by(decoder).values()]
    assert sum(sizes) == 4
    assert min(sizes) == 0
    assert decoder.stats.kept_tokens == [1]


def test_kvzip_repeats_a_further_turn_alone() -> None:
    model, prompt, turn = cached_model(9), random_prompt(30, 9), random_prompt(12, 10)
    decoder = prompt_decoder(model, "kvzip", prompt, changes={"budget": 100})
    before = scores_of(decoder)
    token = decoder.decode(1).tokens[0][0]
    decoder.extend(turn)
    entered = [*prompt, token, *turn]
    expected = reconstruction(model, entered, range(30, 43), entered[30:], range(2))
    for at, score in scores_of(decoder).items():
        assert score == pytest.approx(before[at] | expected[at], rel=1e-9)


def test_sliding_layers_are_repeated_within_their_window(small_chunks: int) -> None:
    """A query that no longer sees its chunk gives it nothing."""
    model, prompt = cached_model(10, windows=(20, None)), random_prompt(45, 10)
    scores = scores_of(prompt_decoder(model, "kvzip", prompt, changes={"budget": 45}))
    assert all(scores[0, head][i] == 0 for head in range(2) for i in range(26))
    assert all(scores[1, head][i] > 0 for head in range(2) for i in range(45))


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"evict_at": "first_step"}, "scorer='reconstruction' needs evict_at='prompt'"),
        ({"window": 8}, "window=8 has no effect with scorer='reconstruction'"),
        ({"refresh": 1}, "scores the prompt alone: give refresh='once'"),
        ({"scope": "shared"}, "allocation='model' needs a set for each layer"),
    ],
)
def test_reconstruction_is_for_prompts_alone(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        policy("kvzip", **changes)


def test_an_instruction_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="repeat_prefix has no effect without scorer='reconstruction'"):
        decoder_for(cached_model(), policy("snapkv"), repeat_prefix=[1])
    with pytest.raises(ValueError, match="repeat_prefix 0 has 61; token ids are whole numbers below 61"):
        decoder_for(cached_model(), policy("kvzip"), repeat_prefix=[61])


def test_kvzip_repeats_the_rows_of_a_batch_as_alone(small_chunks: int) -> None:
    model, prompts = cached_model(11), [random_prompt(length, length) for length in (70, 35, 18, 90)]
    together = decoder_for(model, policy("kvzip", budget=34))
    tokens = together.generate(prompts, 12).tokens
    for row, prompt in enumerate(prompts):
        alone = decoder_for(model, policy("kvzip", budget=34))
        assert alone.generate(prompt, 12).tokens == [tokens[row]]
        assert kept_by(alone) == kept_by(together, row)


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv", "adakv_ea", "kvzip"])
@pytest.mark.parametrize("length", [1, 4, 5, 33])
def test_short_prompts_are_kept_whole(name: str, length: int) -> None:
    model, prompt = cached_model(12), random_prompt(length, 12)
    decoder = decoder_for(model, policy(name, budget=40))
    assert decoder.generate(prompt, 6).tokens == decoder_for(model, None).generate(prompt, 6).tokens
    assert all(kept == set(range(length + 5)) for kept in kept_by(decoder).values())
    assert all(math.isfinite(value) for score in scores_of(decoder).values() for value in score.values())
