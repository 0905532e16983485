"""How a budget is spread over layers, and over the heads of a layer."""

import pytest
import torch

from inertiakv.cache.budgets import pyramid
from inertiakv.eviction.protection import Limits, protected
from inertiakv.eviction.selection import SAFEGUARD, Ranked, joint


def test_a_pyramid_gives_no_layer_more_than_the_prompt() -> None:
    """As the paper's code has it: what the first layers cannot use is not lost."""
    assert pyramid(60, 10, 70, 3) == [70, 60, 50]
    assert pyramid(60, 10, 200, 3) == [108, 60, 12]  # 10 and 97.5, 50, 2.5
    assert pyramid(60, 10, 200, 1) == [60]


@pytest.mark.parametrize("recent, spaced, least", [(0, 0, 4), (3, 3, 9), (9, 9, 18)])
def test_a_head_of_no_worth_keeps_its_safeguard_and_all_that_may_be_protected(
    recent: int, spaced: int, least: int
) -> None:
    position_BXN = torch.arange(40).expand(1, 2, -1)
    utility_BXN = torch.stack((torch.arange(40) / 1000, torch.arange(40) + 1.0))[None]
    limits = Limits(*(torch.tensor([n]) for n in (0, recent, 30, spaced)))
    protected_BXN = protected(position_BXN, torch.tensor([39]), limits)
    # Budgets as an earlier turn left them: a fifth of their sum is spread evenly.
    sets = Ranked(position_BXN, utility_BXN, protected_BXN, torch.tensor([[2, 38]]))
    keep_BXN = joint(sets, limits.number_B, SAFEGUARD)
    assert keep_BXN.sum(-1).tolist() == [[least, 40 - least]]
    assert (keep_BXN | ~protected_BXN).all()
