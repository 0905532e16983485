"""What is recorded inside the graph is what the steps did.

Shape letters: T steps, L layers, B batch, N slots.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compile_tests.tiny import decoder_for, random_prompts, tiny_model
from inertiakv import EvictionConfig
from inertiakv.decoding.recording import Recording

STEPS = 5
LAYERS = (0, 2)
LENGTHS = (30, 9)


def recorded(rule: EvictionConfig, *, compile: bool = False, record: int = STEPS) -> Recording:
    """Two rows, of which the first is evicted to budget at its first step."""
    decoder = decoder_for(tiny_model(layers=3), rule, record=record, compile=compile)
    decoder.generate(random_prompts(LENGTHS), STEPS + 2)
    return decoder.recording()


@pytest.mark.slow
def test_compiled_steps_record_what_eager_ones_do() -> None:
    rule = EvictionConfig(budget=10, layers=LAYERS)
    compiled, eager = (recorded(rule, compile=compile) for compile in (True, False))
    for field in dataclasses.fields(Recording):
        actual, expected = getattr(compiled, field.name), getattr(eager, field.name)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_steps_and_layers_that_do_not_score_record_nothing() -> None:
    recording = recorded(EvictionConfig(budget=10, refresh=2, layers=LAYERS))
    # The steps after the first: the second one does not score, the third one does.
    assert recording.newest_TB.tolist() == [[length + step for length in LENGTHS] for step in range(1, 6)]
    scored_TL = ~recording.score_TLBN.isnan().all(-1).all(-1)
    assert scored_TL.tolist() == [[t % 2 == 1 and layer in LAYERS for layer in range(3)] for t in range(5)]


def test_a_step_records_what_it_saw_before_it_evicts() -> None:
    recording = recorded(EvictionConfig(budget=10))
    held_TB = (recording.position_TBN >= 0).sum(-1)
    assert held_TB.tolist() == [[11, 11]] * STEPS
    same_TBN = recording.position_TBN[1:] == recording.position_TBN[:-1]
    assert ((~same_TBN).sum(-1) == 1).all(), "one token goes, and the next one takes its slot"
    past_TBN = recording.utility_TBN[:-1].where(same_TBN, 0)
    for layer in range(3):
        past_TBN = 0.8 * past_TBN + 0.2 * recording.score_TLBN[1:, layer]
    held_TBN = recording.position_TBN[1:] >= 0
    torch.testing.assert_close(recording.utility_TBN[1:][held_TBN], past_TBN[held_TBN], rtol=1e-4, atol=1e-6)


def test_no_more_than_asked_is_recorded() -> None:
    whole, two = (recorded(EvictionConfig(budget=40), record=steps) for steps in (STEPS + 1, 2))
    assert [len(r.newest_TB) for r in (whole, two)] == [STEPS + 1, 2]
    assert two.newest_TB.tolist() == whole.newest_TB[:2].tolist() == [list(LENGTHS), [31, 10]]


def test_a_decoder_that_does_not_record_says_so() -> None:
    decoder = decoder_for(tiny_model(), EvictionConfig())
    for record in (-1, 2.5, True):
        with pytest.raises(ValueError, match="record must be a whole number of at least 0"):
            decoder_for(tiny_model(), EvictionConfig(), record=record)
    with pytest.raises(ValueError, match="make the Decoder with record="):
        decoder.recording()
    for rule in (None, EvictionConfig(scorer="none"), EvictionConfig(scope="layer")):
        with pytest.raises(ValueError, match="record needs a rule that scores, for one set of all layers"):
            decoder_for(tiny_model(), rule, record=1)
    with pytest.raises(ValueError, match="record takes the steps of an answer, and not those of draft=4"):
        decoder_for(tiny_model(), EvictionConfig(draft=4), record=1)
