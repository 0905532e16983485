"""A benchmark that takes no time: prompts of letters by chance, and a score that tells predictions apart."""

from __future__ import annotations

import random

from inertiakv.evals.prompting import Prompting
from inertiakv.evals.task import Sample

TASKS = ("made:short", "made:long")
PAPER_TASKS = ("made:short",)
NEW_TOKENS = 6


class Made:
    """Prompts of any length, not all quite as long. Every third answer of `made:long` may be longer."""

    metric = "fake"
    lengths = True

    def __init__(self, name: str, prompting: Prompting, seed: int) -> None:
        self.name, self.prompting, self.seed = name, prompting, seed

    def count(self, length: int | None) -> int | None:
        return None

    def sample(self, length: int | None, index: int) -> Sample:
        assert length is not None
        room = length - NEW_TOKENS - self.prompting.count("", " So:") - index % 4
        if room < 1:
            raise ValueError(f"{length} tokens are too few")
        more = 3 if self.name == "made:long" and index % 3 == 0 else 0
        text = letters(f"{self.seed} {self.name} {length} {index}", room)
        facts = {"depth": index}
        return Sample(self.name, length, index, text, " So:", ("a",), NEW_TOKENS + more, facts)

    def score(self, prediction: str, sample: Sample) -> float:
        return score(prediction)


def letters(seed: str, size: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=size))


def score(prediction: str) -> float:
    return sum(prediction.encode()) % 100 / 100 + 0.005


def make(name: str, prompting: Prompting, seed: int) -> Made:
    assert name in TASKS
    return Made(name, prompting, seed)
