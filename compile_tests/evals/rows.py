"""A benchmark whose data decide how long its prompts are."""

from __future__ import annotations

from compile_tests.evals.made import NEW_TOKENS, letters, score
from inertiakv.evals.prompting import Prompting
from inertiakv.evals.task import Sample

TASKS = ("rows",)


class Rows:
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


def make(name: str, prompting: Prompting) -> Rows:
    return Rows()
