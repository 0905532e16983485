"""What must hold of the slot cache whatever is scored: no model, random utilities, all by position.

Shapes: B batch, T tokens, G KV heads, N slots, D head dim.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compile_tests.eviction.utilities import KINDS, kinds, seeds
from compile_tests.tiny import RowState, attend_in_layers, set_states
from inertiakv.cache.retention import RetentionSets
from inertiakv.cache.slot_cache import CacheShape, SlotCache, bucket
from inertiakv.config import Scope
from inertiakv.eviction.protection import Limits, protected
from inertiakv.eviction.rule import evict_one, retained

LAYERS, HEADS, DIM = 2, 3, 4


def make_cache(batch: int, slots: int, scope: Scope = "shared") -> SlotCache:
    shape = CacheShape(LAYERS, batch, HEADS, slots, DIM, scope)
    return SlotCache(shape, dtype=torch.float32, device="cpu")


def encode(row: int, layer: int, position: Tensor) -> Tensor:
    """K of a row's token in a layer, [..., G, D]: every element tells where it belongs. V is its negative."""
    code = position.float() * 1000 + row * 100 + layer * 10
    return code[..., None, None] + torch.arange(HEADS)[:, None] + torch.arange(DIM) / 8


class Sequence:
    """Drives a cache as the passes do, with utilities drawn for every (row, set, position, step)."""

    def __init__(
        self,
        lengths: list[int],
        budgets: list[int],
        sinks: int,
        recent: int,
        kind: str,
        seed: int,
        scope: Scope = "shared",
    ) -> None:
        self.rows, self.budgets, self.sinks, self.recent = range(len(lengths)), budgets, sinks, recent
        self.kind, self.seed, self.scope = kind, seed, scope
        self.names = list(self.rows)
        self.next_B = torch.zeros(len(lengths), dtype=torch.int64)
        self.step = 0
        self.cache = make_cache(len(lengths), bucket(max(lengths) + 1), scope)
        for table in self.cache.retention:
            table.budget_BX.copy_(torch.tensor(budgets)[:, None])
        self.feed(lengths)

    def only(self, row: int) -> Sequence:
        """The same row, alone in its batch; before anything was evicted."""
        length, budget = int(self.next_B[row]), self.budgets[row]
        alone = Sequence([length], [budget], self.sinks, self.recent, self.kind, self.seed, self.scope)
        alone.names = [self.names[row]]
        return alone

    def feed(self, lengths: list[int]) -> None:
        """Enter tokens behind those in the cache, padding the shorter rows."""
        length_B = torch.tensor(lengths)
        offset_T = torch.arange(max(lengths))
        real_BT = offset_T < length_B[:, None]
        positions_BT = torch.where(real_BT, self.next_B[:, None] + offset_T, -1)
        slots_BT = (self.cache.most_B[:, None] + offset_T).clamp_max(self.cache.shape.slots - 1)
        slots_BXT = slots_BT[:, None].expand(-1, self.cache.shape.sets, -1)
        self._write([slots_BXT] * len(self.cache.retention), positions_BT)
        self.next_B += length_B
        for table in self.cache.retention:
            table.free_BX.copy_(self.cache.most_B[:, None])

    def _write(self, slots_BXT: list[Tensor], positions_BT: Tensor) -> None:
        for table, slots in zip(self.cache.retention, slots_BXT, strict=True):
            table.insert(slots, positions_BT)
        for index, layer in enumerate(self.cache.layers):
            k_BTGD = torch.stack([encode(row, index, positions_BT[row]) for row in self.rows])
            slots = slots_BXT[0 if self.scope == "shared" else index]
            layer.write(slots, k_BTGD.transpose(1, 2), -k_BTGD.transpose(1, 2))

    def score(self) -> None:
        """A new utility for every token, the same whatever slot and batch the token is in."""
        self.step += 1
        for index, table in enumerate(self.cache.retention):
            for row, x in product(self.rows, range(self.cache.shape.sets)):
                name = self.names[row] + 31 * index + 101 * x
                generator = torch.Generator().manual_seed(self.seed + 7919 * name + 104729 * self.step)
                drawn_P = KINDS[self.kind](torch.rand(1024, generator=generator))
                position_N = table.position_BXN[row, x]
                drawn_N = drawn_P[position_N.clamp_min(0)]
                table.utility_BXN[row, x] = torch.where(position_N >= 0, drawn_N, 0.0)

    def protected(self, table: RetentionSets) -> Tensor:
        number_B = torch.ones_like(self.next_B)
        limits = Limits(self.sinks * number_B, self.recent * number_B, number_B, spaced_B=None)
        return protected(table.position_BXN, self.next_B - 1, limits)

    def states(self) -> list[list[RowState]]:
        return [set_states(self.cache, row) for row in self.rows]

    def expected(self, row: int) -> list[list[int]]:
        """What stays of a row's sets when they are evicted to budget now, by the rule in plain Python."""
        newest, kept = int(self.next_B[row]) - 1, []
        for state in set_states(self.cache, row):
            utility = state.utility()
            surplus = len(utility) - self.budgets[row]
            free = [p for p in utility if p >= self.sinks and p <= newest - self.recent]
            gone = sorted(free, key=lambda p: (utility[p], p))[: max(0, surplus)]
            kept.append(sorted(utility.keys() - gone))
        return kept

    def evict_all(self, slots: int | None = None) -> None:
        self.score()
        expected = [self.expected(row) for row in self.rows]
        slots = bucket(max(self.budgets) + 1) if slots is None else slots
        tables = self.cache.retention
        self.move(
            slots, [retained(t.position_BXN, t.utility_BXN, self.protected(t), t.budget_BX) for t in tables]
        )
        self.check(expected)

    def move(self, slots: int, keep_BXN: list[Tensor] | None = None) -> None:
        target = make_cache(len(self.rows), slots, self.scope)
        for module in (*target.retention, *target.layers):
            for buffer in module.buffers():
                buffer.fill_(torch.nan if buffer.is_floating_point() else 77)  # whatever was there before
        target.take_from(self.cache, self.cache.everything() if keep_BXN is None else keep_BXN, release=True)
        self.cache = target

    def decode(self, active_B: Tensor | None = None, check: bool = True) -> None:
        active_B = torch.ones(len(self.rows), dtype=torch.bool) if active_B is None else active_B
        slots_BXT = [table.free_BX[..., None] for table in self.cache.retention]
        self._write(slots_BXT, torch.where(active_B, self.next_B, -1)[:, None])
        self.next_B += active_B
        before = self.states()
        self.score()
        expected = [
            self.expected(row) if active_B[row] else [state.kept for state in before[row]]
            for row in self.rows
        ]
        for table in self.cache.retention:
            evict_one(table, table.utility_BXN, self.protected(table), active_B)
        if check:
            self.check(expected)

    def check(self, expected: list[list[list[int]]]) -> None:
        for row in self.rows:
            newest = int(self.next_B[row]) - 1
            states = set_states(self.cache, row)
            assert [state.kept for state in states] == expected[row]
            for state in states:
                assert len(state.kept) <= self.budgets[row]
                assert set(range(min(self.sinks, newest + 1))) <= set(state.kept)
                assert set(range(max(0, newest + 1 - self.recent), newest + 1)) <= set(state.kept)
                for index, layer in enumerate(state.layers):
                    wanted_GND = encode(row, layer, torch.tensor(state.kept)).transpose(0, 1)[state.heads]
                    assert torch.equal(state.k_LGND[index], wanted_GND)
                    assert torch.equal(state.v_LGND[index], -wanted_GND)
        for table in self.cache.retention:
            empty_BXN = table.position_BXN < 0
            assert not table.utility_BXN[empty_BXN].any()
            assert empty_BXN.gather(-1, table.free_BX[..., None]).all()


@st.composite
def sequences(draw: st.DrawFn, rows: int = 3) -> Sequence:
    batch = draw(st.integers(1, rows))
    sinks, recent = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(1, 300), min_size=batch, max_size=batch))
    budgets = draw(st.lists(st.integers(max(1, sinks + recent), 40), min_size=batch, max_size=batch))
    scope = draw(st.sampled_from(get_args(Scope)))
    return Sequence(lengths, budgets, sinks, recent, draw(kinds), draw(seeds), scope)


@given(sequences(), st.integers(1, 60))
def test_large_and_single_evictions_keep_the_best_tokens_with_their_k_and_v(
    sequence: Sequence, turn: int
) -> None:
    for _ in range(3):
        before = sequence.states()
        sequence.evict_all()
        for row, states in enumerate(sequence.states()):
            for old, new in zip(before[row], states, strict=True):
                assert set(new.kept) <= set(old.kept), "an evicted token came back"
        for _ in range(6):
            sequence.decode()
        sequence.move(bucket(int(sequence.cache.most_B.max()) + turn + 1))
        sequence.feed([turn if row == 0 else max(1, turn // 2) for row in sequence.rows])
    sequence.evict_all()


@given(sequences(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_rows_that_have_ended_stay_bit_for_bit(sequence: Sequence, active: list[bool]) -> None:
    sequence.evict_all()
    active_B = torch.tensor(active)[: len(sequence.rows)]
    before = sequence.states()
    for _ in range(5):
        sequence.decode(active_B)
        for row in sequence.rows:
            if not active_B[row]:
                for old, state in zip(before[row], set_states(sequence.cache, row), strict=True):
                    assert state.kept == old.kept
                    assert torch.equal(state.k_LGND, old.k_LGND)


@given(sequences())
def test_a_row_in_a_batch_is_the_row_alone_bit_for_bit(sequence: Sequence) -> None:
    alone = [sequence.only(row) for row in sequence.rows]
    slots = bucket(max(sequence.budgets) + 1)
    for one in (sequence, *alone):
        one.evict_all(slots)
        for _ in range(6):
            one.decode(check=False)
    for row, one in enumerate(alone):
        for mine, theirs in zip(sequence.cache.retention, one.cache.retention, strict=True):
            for name, buffer in mine.named_buffers():
                assert torch.equal(buffer[row], getattr(theirs, name)[0])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_protected_tokens_survive_utilities_that_swallow_a_bonus(kind: str) -> None:
    sequence = Sequence([200, 90], [12, 8], sinks=4, recent=4, kind=kind, seed=3)
    sequence.evict_all()
    for _ in range(40):
        sequence.decode()


@given(sequences(), st.integers(1, 3), seeds, st.booleans())
def test_what_lies_in_unused_slots_never_matters(
    sequence: Sequence, queries: int, seed: int, full: bool
) -> None:
    if not full:
        sequence.evict_all()
    sequence.move(bucket(int(sequence.cache.most_B.max()) + queries))
    clean, dirty = sequence.cache, copy.deepcopy(sequence.cache)
    for index, layer in enumerate(dirty.layers):
        table = dirty.sets_of(index)
        unused_BGN = (table.position_BXN < 0).expand(-1, HEADS, -1)
        # A chunk of queries only ever meets caches that were cleared, or filled from others.
        layer.k_BGND[unused_BGN] = torch.nan if queries == 1 else 1e30
        layer.v_BGND[unused_BGN] = 1e30
    outputs = [attend(cache, sequence.next_B, queries, seed) for cache in (clean, dirty)]
    assert torch.equal(outputs[0], outputs[1])


def attend(cache: SlotCache, next_B: Tensor, queries: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q_BHTD, k_BGTD, v_BGTD = (
        torch.randn(len(next_B), heads, queries, DIM, generator=generator)
        for heads in (2 * HEADS, HEADS, HEADS)
    )
    positions_BT = next_B[:, None] + torch.arange(queries)
    return attend_in_layers(cache, positions_BT, (q_BHTD, k_BGTD, v_BGTD), windows=(None, 9))


def test_clearing_forgets_a_cache_full_of_nan() -> None:
    outputs = []
    for dirty in (False, True):
        cache = make_cache(2, 128)
        if dirty:
            for layer in cache.layers:
                layer.k_BGND.fill_(torch.nan)
                layer.v_BGND.fill_(torch.nan)
            cache.retention[0].position_BXN.random_(0, 500)
            cache.retention[0].utility_BXN.fill_(torch.nan)
            cache.retention[0].free_BX.fill_(9)
        cache.clear()
        assert cache.most_B.tolist() == [0, 0]
        assert not cache.retention[0].utility_BXN.any()
        outputs.append(attend(cache, torch.tensor([0, 0]), 1, seed=1))
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[1].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000, 1023, 1024, 1025, 2047, 2049, 64029])
def test_buckets_hold_what_was_asked_for_with_little_waste(tokens: int) -> None:
    slots = bucket(tokens)
    assert tokens <= slots <= max(128, tokens * 1.125 + 128)
    assert slots % 128 == 0
    assert bucket(slots) == slots
