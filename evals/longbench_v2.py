"""LongBench-v2 ([arXiv 2412.15204](https://arxiv.org/abs/2412.15204)): 503 questions with four choices each.

Prompt (without reasoning), truncation and extraction of the answer are those of the authors' scripts. They
sample at temperature 0.1; here decoding is greedy, so that rules differ in what they keep and not in luck.
They leave out empty answers; here all 503 count. `difficulty` and `length` among a sample's facts are what
their table is grouped by: Overall, Easy, Hard, Short, Medium, Long.
"""

from __future__ import annotations

from pathlib import Path

from . import metrics
from .documents import Documents
from .prompting import Prompting
from .rows import Hub, load_rows
from .task import Sample
from .truncation import cut_joined

TASKS = ("longbench-v2",)
PROMPT = """Please read the following text and answer the question below.

<text>
$DOC$
</text>

What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

Format your response as follows: "The correct answer is (insert answer here)"."""
MAX_LENGTH = 120_000
MAX_NEW_TOKENS = 128
_FILLED = {
    "$DOC$": "context",
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}
_FACTS = ("_id", "domain", "difficulty", "length")
_FIELDS = dict.fromkeys([*_FILLED.values(), "answer", *_FACTS], str)


class LongBenchV2(Documents):
    """Its one task."""

    name = "longbench-v2"
    metric = "accuracy"

    def sample(self, length: int | None, index: int) -> Sample:
        row = self._rows[index]
        prompt = PROMPT
        for place, field in _FILLED.items():
            prompt = prompt.replace(place, row[field].strip())
        return self._cut_sample(
            index,
            prompt,
            cut_joined,
            references=(row["answer"],),
            max_new_tokens=MAX_NEW_TOKENS,
            facts={field: row[field] for field in _FACTS},
        )

    def score(self, prediction: str, sample: Sample) -> float:
        return metrics.best(metrics.choice, prediction, sample.references)


def make(
    name: str,
    *,
    prompting: Prompting,
    max_positions: int,
    data: Path | None = None,
    max_length: int = MAX_LENGTH,
) -> LongBenchV2:
    """The task `longbench-v2`.

    data: a folder with the published `data.json`, or with `longbench-v2.jsonl` (or .json, .parquet); else the
        hub.
    max_length: tokens that a prompt may have before the chat template, and never more than the model's
        positions leave.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r} in LongBench-v2: it has one, {TASKS[0]}")
    hub = Hub("THUDM/LongBench-v2", None, split="train")
    files = ("data.json", *(f"{name}{suffix}" for suffix in (".json", ".jsonl", ".parquet")))
    rows = load_rows(name, files, _FIELDS, hub, data)
    return LongBenchV2(rows, prompting, max_positions, max_length)
