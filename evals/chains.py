"""Long generation: a short prompt, and an answer of many steps that the model writes down itself.

After a while most of the context is the model's own text, so that a rule that evicts while decoding is seen
at work: run it with a budget in tokens. A prompt gives a short list to be gone through again and again, and
each step takes its turn of the list and something that an earlier line says:

* `chains:copy`: the list's words, numbered on and on;
* `chains:sum`: a running sum, which needs the line before.

The answer is begun for the model with two rounds of the list, so that the form is clear to a small one, too
(SmolLM2-135M copies, but cannot add). The score is the share of all further steps that are right, in order,
before the first wrong one.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from . import metrics
from .task import Prompting, Sample

FEWEST_STEPS = 8
"""Beyond those that are given."""
_WORDS = (
    *("river", "apple", "candle", "window", "garden", "silver", "morning", "paper", "bridge", "winter"),
    *("button", "orange", "table", "forest", "music", "pencil", "summer", "bottle", "island", "carpet"),
    *("feather", "hammer", "kitchen", "lantern", "mirror", "needle", "ocean", "pillow", "rabbit", "saddle"),
)


@dataclass(frozen=True)
class Problem:
    instruction: str
    given: str
    steps: Iterator[str]
    """The right ones without their numbers, endless."""
    round: int
    """Steps of one round of the list."""


def copy_words(rng: random.Random) -> Problem:
    words = rng.sample(_WORDS, 12)
    instruction = (
        "Write the words of a list one after another, each on a line with a number. After the last word "
        "comes the first again."
    )
    return Problem(instruction, f"List: {', '.join(words)}", cycle(words), len(words))


def running_sum(rng: random.Random) -> Problem:
    start = rng.randint(1, 20)
    addends = [(word, rng.randint(1, 9)) for word in rng.sample(_WORDS, 4)]

    def steps(total: int) -> Iterator[str]:
        for word, addend in cycle(addends):
            yield f"{word} {addend}, {total} + {addend} = {total + addend}"
            total += addend

    instruction = (
        "Add the numbers of a list one after another, each to the sum so far. After the last number comes "
        "the first again. Write on a line the name of the number and the addition."
    )
    listed = ", ".join(f"{word} {addend}" for word, addend in addends)
    return Problem(instruction, f"Start: {start}\nList: {listed}", steps(start), len(addends))


PROBLEMS = {"chains:copy": copy_words, "chains:sum": running_sum}
TASKS = tuple(PROBLEMS)


class Chains:
    """One kind of problem: as many samples as are asked for, as many steps as the length takes."""

    metric = "right steps"
    lengths = True

    def __init__(self, name: str, prompting: Prompting, seed: int = 42) -> None:
        self.name, self._prompting, self._seed = name, prompting, seed

    def count(self, length: int | None) -> None:
        return None

    def sample(self, length: int | None, index: int) -> Sample:
        assert length is not None
        problem = PROBLEMS[self.name](random.Random(f"{self._seed} {self.name} {length} {index}"))
        # No step takes less than two tokens, its number and its end.
        lines = [f"{number}: {step}" for number, step in enumerate(islice(problem.steps, length // 2), 1)]
        given = 2 * problem.round
        begun = "\n".join([*lines[:given], f"{given + 1}:"])

        def prompt(steps: int) -> str:
            return f"{problem.instruction}\n\n{problem.given}\n\nSteps 1 to {steps}:\n"

        def too_long(steps: int) -> bool:
            # One more token ends the answer.
            return self._prompting.count(prompt(steps), "\n".join(lines[:steps])) + 1 > length

        steps = bisect_left(range(1, len(lines) + 1), True, key=too_long)
        if steps < given + FEWEST_STEPS:
            raise ValueError(f"a length of {length} is too short for {FEWEST_STEPS} steps of {self.name}")
        return Sample(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt(steps),
            answer_prefix=begun,
            references=("\n".join(lines[given:steps]),),
            max_new_tokens=length - self._prompting.count(prompt(steps), begun),
            facts={"steps": steps - given},
        )

    def score(self, prediction: str, sample: Sample) -> float:
        first = sample.answer_prefix.splitlines()[-1]
        return metrics.prefix_share(first + prediction, sample.references[0])
