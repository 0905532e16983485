"""Benchmarks that take no time: prompts of random letters, and a score that tells predictions apart."""

from __future__ import annotations

import random
from types import SimpleNamespace

from inertiakv.evals.registry import Benchmark
from inertiakv.evals.task import Prompting, Sample

NEW_TOKENS = 6
ESSAYS = SimpleNamespace(name="essays of these tests", sha256="e5")


class FakeTask:
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


class FakeDataTask:
    """Prompts of its own lengths, in no order; one goes without the chat template."""

    name = "rows"
    metric = "fake"
    lengths = False
    source = "rows.jsonl (sha256 0)"
    sizes = (190, 90, 150, 230, 110)

    def count(self, length: int | None) -> int:
        return len(self.sizes)

    def sample(self, length: int | None, index: int) -> Sample:
        assert length is None
        text = letters(f"rows {index}", self.sizes[index])
        return Sample(self.name, None, index, text, "", ("a", "b"), NEW_TOKENS, chat=index != 2)

    def score(self, prediction: str, sample: Sample) -> float:
        return score(prediction)


def letters(seed: str, size: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=size))


def score(prediction: str) -> float:
    return sum(prediction.encode()) % 100 / 100 + 0.005


BENCHMARKS = {
    "made": Benchmark(
        ("made:short", "made:long"),
        ("lengths", "essays"),
        lambda name, setting: FakeTask(name, setting.prompting, setting.seed),
        ("made:short",),
    ),
    "rows": Benchmark(("rows",), ("data",), lambda name, setting: FakeDataTask()),
}
