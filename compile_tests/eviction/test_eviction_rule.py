"""Which tokens a set keeps: evicted at once or one by one, in any slots.

Shapes: B batch, N slots.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compile_tests.eviction.utilities import KINDS, kinds, seeds
from inertiakv.eviction.rule import next_slot, retained

Table = tuple[Tensor, Tensor, Tensor, Tensor]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """position, utility, protected [B, N] and a budget: tokens in any slots, some of them empty."""
    batch, slots = draw(st.integers(1, 3)), draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(draw(seeds))
    position_BN = torch.stack([torch.randperm(slots, generator=generator) for _ in range(batch)]).int() * 3
    empty_BN = torch.rand(batch, slots, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8]))
    position_BN = torch.where(empty_BN, -1, position_BN)
    utility_BN = KINDS[draw(kinds)](torch.rand(batch, slots, generator=generator))
    budget = draw(st.integers(1, slots - 1))
    protected_BN = torch.rand(batch, slots, generator=generator) < 0.4
    protected_BN &= protected_BN.cumsum(-1) <= budget
    return position_BN, torch.where(empty_BN, 0.0, utility_BN), protected_BN, torch.full((batch,), budget)


def evict_one_by_one(tables: Table) -> Tensor:
    position_BN, utility_BN, protected_BN, budget_B = tables
    position_BN = position_BN.clone()
    while bool((position_BN >= 0).sum(-1).gt(budget_B).any()):
        position_BN.scatter_(1, next_slot(position_BN, utility_BN, protected_BN, budget_B)[:, None], -1)
    return position_BN >= 0


@given(tables())
def test_evicting_one_by_one_keeps_what_evicting_at_once_keeps(tables: Table) -> None:
    keep_BN = retained(*tables)
    assert torch.equal(evict_one_by_one(tables), keep_BN)
    position_BN, _, protected_BN, budget_B = tables
    assert keep_BN.sum(-1).equal(torch.minimum(budget_B, (position_BN >= 0).sum(-1)))
    assert bool(keep_BN[protected_BN & (position_BN >= 0)].all())


@given(tables(), seeds)
def test_the_order_of_slots_decides_nothing(tables: Table, seed: int) -> None:
    position_BN, utility_BN, protected_BN, budget_B = tables
    order_N = torch.randperm(position_BN.shape[1], generator=torch.Generator().manual_seed(seed))
    moved = (position_BN[:, order_N], utility_BN[:, order_N], protected_BN[:, order_N], budget_B)
    assert torch.equal(retained(*moved), retained(*tables)[:, order_N])
    chosen, chosen_moved = (next_slot(*t)[:, None] for t in (tables, moved))
    assert torch.equal(moved[0].gather(1, chosen_moved), position_BN.gather(1, chosen))


@given(tables())
def test_the_next_token_takes_an_empty_slot_while_there_is_room(tables: Table) -> None:
    position_BN, _, protected_BN, budget_B = tables
    slot_B1 = next_slot(*tables)[:, None]
    room_B = (position_BN >= 0).sum(-1) <= budget_B
    assert torch.equal(position_BN.gather(1, slot_B1)[:, 0] == -1, room_B)
    assert not (protected_BN.gather(1, slot_B1)[:, 0] & ~room_B).any()
