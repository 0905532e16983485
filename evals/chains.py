"""Long generation: a short prompt, and an answer of many steps that the model writes down itself.

After a while most of the context is the model's own text, so that a rule that evicts while decoding is seen
at work: run it with a budget in tokens. A prompt gives a short list to be gone through again and again, and
each step takes its turn of the list and something that an earlier line says:

* `chains:copy`: the list's words, numbered on and on;
* `chains:sum`: a running sum, which needs the line before;
* `chains:states`: boxes that swap what they hold, which needs the lines that touched these two boxes last.

The answer is begun for the model with two rounds of the list, so that the form is clear to a small one, too
(SmolLM2-135M copies, but cannot add). The score is the share of all further steps that are right, in order,
before the first wrong one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

from . import metrics
from .prompting import Prompting
from .task import Sample

FEWEST_STEPS = 8
"""Beyond those that are given."""
_WORDS = (
    *("river", "apple", "candle", "window", "garden", "silver", "morning", "paper", "bridge", "winter"),
    *("button", "orange", "table", "forest", "music", "pencil", "summer", "bottle", "island", "carpet"),
    *("feather", "hammer", "kitchen", "lantern", "mirror", "needle", "ocean", "pillow", "rabbit", "saddle"),
)
_THINGS = ("coin", "key", "ring", "bell", "pen", "cup", "map")


@dataclass(frozen=True)
class Problem:
    """What is given, and what the steps have behind their numbers: as many as are asked for."""

    given: str
    lines: Iterator[str]
    round: int
    """Steps of one round of the list."""


@dataclass(frozen=True)
class Kind:
    """A family of problems. `make` takes their size."""

    task: str
    make: Callable[[random.Random, int], Problem]
    size: int


def make_copy(rng: random.Random, size: int) -> Problem:
    """A list of so many words."""
    words = rng.sample(_WORDS, size)
    return Problem(f"List: {', '.join(words)}", cycle(words), size)


def make_sum(rng: random.Random, size: int) -> Problem:
    """A start and a list of so many digits with names."""
    start = rng.randint(1, 20)
    addends = [(word, rng.randint(1, 9)) for word in rng.sample(_WORDS, size)]

    def lines(total: int) -> Iterator[str]:
        for word, addend in cycle(addends):
            yield f"{word} {addend}, {total} + {addend} = {total + addend}"
            total += addend

    given = ", ".join(f"{word} {addend}" for word, addend in addends)
    return Problem(f"Start: {start}\nList: {given}", lines(start), size)


def make_states(rng: random.Random, size: int) -> Problem:
    """So many boxes, and one swap less. Swaps that connect all boxes, whatever their order, move everything,
    and only after as many rounds as there are boxes is all where it was: lines repeat late."""
    boxes, things = "ABCDEFG"[:size], rng.sample(_THINGS, size)
    path = rng.sample(boxes, size)
    swaps = rng.sample([sorted(pair) for pair in pairwise(path)], size - 1)

    def lines(inside: dict[str, str]) -> Iterator[str]:
        for one, two in cycle(swaps):
            inside[one], inside[two] = inside[two], inside[one]
            yield f"swap {one} {two}, {one} = {inside[one]}, {two} = {inside[two]}"

    inside = dict(zip(boxes, things, strict=True))
    start = ", ".join(f"{box} = {thing}" for box, thing in inside.items())
    return Problem(f"Start: {start}\nList: {', '.join(map(' '.join, swaps))}", lines(inside), size - 1)


KINDS = {
    "chains:copy": Kind(
        "Write the words of a list one after another, each on a line with a number. After the last word "
        "comes the first again.",
        make_copy,
        size=12,
    ),
    "chains:sum": Kind(
        "Add the numbers of a list one after another, each to the sum so far. After the last number comes "
        "the first again. Write on a line the name of the number and the addition.",
        make_sum,
        size=4,
    ),
    "chains:states": Kind(
        "There are boxes with one thing in each. A list says which two boxes swap their things, one swap "
        "after another. After the last swap comes the first again. Write on a line which boxes swap, and "
        "what is in them then.",
        make_states,
        size=5,
    ),
}
TASKS = tuple(KINDS)


class Chains:
    """One kind. As many samples as are asked for; as many steps as go into the length."""

    metric = "right steps"
    lengths = True

    def __init__(self, name: str, prompting: Prompting, seed: int):
        self.name = name
        self._kind = KINDS[name]
        self._prompting = prompting
        self._seed = seed

    def count(self, length: int | None) -> None:
        return None

    def sample(self, length: int | None, index: int) -> Sample:
        assert length is not None
        problem = self._kind.make(
            random.Random(f"{self._seed} {self.name} {length} {index}"), self._kind.size
        )
        # No step takes less than two tokens, its number and its end.
        lines = [f"{number}: {line}" for number, line in enumerate(islice(problem.lines, length // 2), 1)]
        given = 2 * problem.round
        begun = "\n".join([*lines[:given], f"{given + 1}:"])

        def ask(steps: int) -> str:
            return f"{self._kind.task}\n\n{problem.given}\n\nSteps 1 to {steps}:\n"

        def fits(steps: int) -> bool:
            # And the token that ends the answer.
            return self._prompting.count(ask(steps), "\n".join(lines[:steps])) + 1 <= length

        steps = _largest(fits, len(lines))
        if steps < given + FEWEST_STEPS:
            raise ValueError(f"a length of {length} is too short for {FEWEST_STEPS} steps of {self.name}")
        return Sample(
            task=self.name,
            length=length,
            index=index,
            prompt=ask(steps),
            answer_prefix=begun,
            references=("\n".join(lines[given:steps]),),
            max_new_tokens=length - self._prompting.count(ask(steps), begun),
            facts={"steps": steps - given},
        )

    def score(self, prediction: str, sample: Sample) -> float:
        first = sample.answer_prefix.splitlines()[-1]
        return metrics.prefix_share(first + prediction, sample.references[0])


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, where none above one that does not fit does; 0: none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def make(name: str, *, prompting: Prompting, seed: int = 42) -> Chains:
    """The task `chains:sum` and so on."""
    if name not in TASKS:
        raise ValueError(f"no task {name!r} in the chains: one of {', '.join(TASKS)}")
    return Chains(name, prompting, seed)
