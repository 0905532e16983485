"""LongBench ([arXiv 2308.14508](https://arxiv.org/abs/2308.14508)): questions about real, long documents.

Prompts, generation lengths, truncation and metrics are those of the authors' scripts. These leave one thing
open, the chat template of today's models: here it is the tokenizer's own, around the truncated prompt. What
is to be continued rather than answered (`Dataset.chat`) goes without one, as there.

Two more differences, of no consequence for a score: `samsum` does not stop at the end of a line, its first
line is taken afterwards; and an empty prediction is scored by no metric, it is 0.
"""

from __future__ import annotations

from pathlib import Path

from . import metrics
from .documents import Documents
from .longbench_prompts import DATASETS, PAPER
from .prompting import Prompting
from .rows import Hub, Rows, load_rows
from .task import Sample
from .truncation import cut_halves

PAPER_TASKS = tuple(f"longbench:{name}" for name in PAPER)
TASKS = tuple(f"longbench:{name}" for name in DATASETS)
_METRICS: dict[str, metrics.Metric] = {
    "qa_f1": metrics.qa_f1,
    "rouge-l": metrics.rouge_l,
    "retrieval": metrics.retrieval,
    "count": metrics.count,
}
_FIELDS = {"input": str, "context": str, "answers": list}


class LongBench(Documents):
    """One of its tasks."""

    def __init__(
        self, name: str, rows: Rows, prompting: Prompting, max_positions: int, max_length: int | None
    ):
        super().__init__(rows, prompting, max_positions, max_length)
        self.name = name
        self.dataset = DATASETS[name.removeprefix("longbench:")]
        metric = self.dataset.metric
        self.metric = metrics.rouge_l_title() if metric == "rouge-l" else metric

    def sample(self, length: int | None, index: int) -> Sample:
        row = self._rows[index]
        return self._cut_sample(
            index,
            self.dataset.prompt.format(context=row["context"], input=row["input"]),
            cut_halves,
            references=tuple(row["answers"]),
            max_new_tokens=self.dataset.max_new_tokens,
            facts={key: row[key] for key in ("_id", "length") if key in row},
            chat=self.dataset.chat,
        )

    def score(self, prediction: str, sample: Sample) -> float:
        if self.dataset.first_line:
            prediction = prediction.lstrip("\n").split("\n")[0]
        return metrics.best(_METRICS[self.dataset.metric], prediction, sample.references)


def make(
    name: str,
    *,
    prompting: Prompting,
    max_positions: int,
    data: Path | None = None,
    max_length: int | None = None,
) -> LongBench:
    """The task `longbench:hotpotqa` and so on.

    data: a folder with `hotpotqa.jsonl` (or .parquet), or with the published archive's folder `data`; else
        the hub, a mirror that needs no script.
    max_length: tokens that a prompt may have before the chat template. None: as many as the model's positions
        leave. The authors' values: 3500 for a context of 4k, 7500 for 8k, 15500 for 16k, 31500 for 32k.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r} in LongBench: one of {', '.join(TASKS)}")
    short = name.removeprefix("longbench:")
    files = (
        f"{short}.jsonl",
        f"data/{short}.jsonl",
        f"{short}.parquet",
        f"{short}/test-00000-of-00001.parquet",
    )
    rows = load_rows(name, files, _FIELDS, Hub("Xnhyacinth/LongBench", short, split="test"), data)
    for number, row in enumerate(rows.rows, 1):
        if not row["answers"] or not all(isinstance(answer, str) for answer in row["answers"]):
            raise ValueError(f"{rows.source}: row {number}: 'answers' is not a list of texts")
    return LongBench(name, rows, prompting, max_positions, max_length)
