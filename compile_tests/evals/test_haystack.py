"""Haystacks: as many units as fit, counted few times, and needles where they are said to be."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from inertiakv.evals.essays import split_sentences
from inertiakv.evals.ruler.generated import DEPTHS, hide_in_lines, hide_in_sentences, most_units

SEEDS = st.integers(0, 3)


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=300),
    least=st.integers(1, 20),
    room=st.integers(0, 1500),
)
def test_as_many_units_as_fit(costs: list[int], least: int, room: int) -> None:
    def tokens(units: int) -> int:
        nonlocal calls
        calls += 1
        assert least <= units <= len(costs) + least
        return 50 + sum(costs[: units - least])

    calls = 0
    limit = 50 + room
    units = most_units(tokens, limit, least, len(costs) + least)
    assert calls < 40
    assert tokens(units) <= limit
    if units < len(costs) + least:
        assert tokens(units + 1) > limit or limit - tokens(units) <= limit // 500


def test_few_counts_of_long_prompts() -> None:
    rng = Random(0)
    costs = [rng.choice((1, 1, 2, 3)) for _ in range(100_000)]
    calls: list[int] = []

    def tokens(units: int) -> int:
        calls.append(units)
        return 100 + sum(costs[:units])

    assert 131_072 * 0.998 <= tokens(most_units(tokens, 131_072, 20)) <= 131_072
    assert len(calls) <= 8


@given(lines=st.integers(1, 30), data=st.data())
def test_needles_between_lines(lines: int, data: st.DataObject) -> None:
    needles = [f"needle {number}" for number in range(data.draw(st.integers(1, lines)))]
    rng = Random(data.draw(SEEDS))
    hidden, depths = hide_in_lines(rng, [f"line {number}" for number in range(lines)], needles)
    assert [line for line in hidden if line in needles] == needles
    rest = [line for line in hidden if line not in needles]
    assert rest == [f"line {number}" for number in range(lines)]
    assert "needle" not in hidden[-1]
    for depth, needle in zip(depths, needles, strict=True):
        behind = [line for line in hidden[: hidden.index(needle)] if line in rest]
        assert depth == round(100 * len(behind) / lines)


@given(count=st.integers(1, 60), needles=st.integers(1, 8), seed=SEEDS)
def test_needles_between_sentences(count: int, needles: int, seed: int) -> None:
    sentences = [f"Sentence {number}." for number in range(count)]
    hidden = [f"Needle {number}." for number in range(needles)]
    text, depths = hide_in_sentences(Random(seed), sentences, hidden)
    assert depths == sorted(set(depths))
    assert set(depths) <= set(DEPTHS)
    found = split_sentences(text.strip())
    assert [sentence for sentence in found if sentence.startswith("Needle")] == hidden
    assert [sentence for sentence in found if sentence.startswith("Sent")] == sentences
    for depth, needle in zip(depths, hidden, strict=True):
        before = [sentence for sentence in found[: found.index(needle)] if sentence in sentences]
        assert len(before) == int(count * depth / 100)


def test_depths() -> None:
    assert len(set(DEPTHS)) == 40
    assert DEPTHS[:4] == [0, 3, 5, 8]
    assert DEPTHS[-2:] == [97, 100]
