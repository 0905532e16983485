"""Questions about real, long documents: LongBench ([arXiv 2308.14508](https://arxiv.org/abs/2308.14508)) and
LongBench-v2 ([arXiv 2412.15204](https://arxiv.org/abs/2412.15204)), 503 questions with four choices each.

Prompts, generation lengths, truncation and metrics are those of the authors' scripts. They leave the chat
template of today's models open: here it is the tokenizer's own, around the truncated prompt. What is to be
continued rather than answered (`Prompt.chat`) goes without one, as there.

Differences. LongBench: `samsum` does not stop at the end of a line, its first line is taken afterwards; and
an empty prediction is scored by no metric, it is 0 (neither changes a score). LongBench-v2 (no reasoning):
they sample at temperature 0.1, here decoding is greedy, so that policies differ in what they keep and not in
luck; they leave out empty answers, here all 503 count. `difficulty` and `length` among a sample's facts are
what their table is grouped by.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import metrics
from .data_files import Hub, Row, load_dataset
from .longbench_prompts import PAPER, PROMPTS, V2_PLACEHOLDERS, V2_PROMPT
from .task import Prompting, Sample

PAPER_TASKS = tuple(f"longbench:{name}" for name in PAPER)
TASKS = tuple(f"longbench:{name}" for name in PROMPTS)
V2_TASKS = ("longbench-v2",)
V2_MAX_LENGTH = 120_000
_METRICS: dict[str, metrics.Metric] = {
    "qa_f1": metrics.qa_f1,
    "rouge-l": metrics.rouge_l,
    "retrieval": metrics.retrieval,
    "count": metrics.count,
}
_V2_FACTS = ("_id", "domain", "difficulty", "length")


class _Documents:
    """Prompts that are cut to what the model takes."""

    name: str
    lengths = False
    fields: dict[str, type]
    joined: bool
    """Whether the halves of a cut prompt are decoded together."""
    max_length: int | None = None
    """Tokens of a prompt before the chat template; None: what the model's positions leave."""

    def __init__(
        self, files: Sequence[str], hub: Hub, prompting: Prompting, max_positions: int, data: Path | None
    ) -> None:
        self._rows, self.source = load_dataset(self.name, files, self.fields, hub, data)
        self._prompting, self._max_positions = prompting, max_positions

    def count(self, length: int | None) -> int:
        return len(self._rows)

    def _sample(
        self,
        index: int,
        prompt: str,
        references: Sequence[str],
        new_tokens: int,
        facts: Row,
        chat: bool = True,
    ) -> Sample:
        prompt, cut_facts = self._fit(prompt, new_tokens, chat)
        facts = facts | cut_facts
        return Sample(self.name, None, index, prompt, "", tuple(references), new_tokens, facts, chat)

    def _fit(self, prompt: str, new_tokens: int, chat: bool) -> tuple[str, dict[str, Any]]:
        """The prompt, cut in the middle where it must be (both ends may hold instructions), and the facts:
        tokens that it had, tokens that it may have, and whether it was cut.

        Text that is decoded and encoded again may come to a few tokens more: then a little more is cut.
        Raises ValueError where the model has no positions to spare."""
        tokenizer = self._prompting.tokenizer
        ids = tokenizer(prompt, verbose=False)["input_ids"]
        template = self._prompting.count("", chat=chat) - len(tokenizer("")["input_ids"])
        room = self._max_positions - new_tokens
        limit = min(room - template, self.max_length or room)
        while limit >= 2:
            text = cut_middle(tokenizer, ids, limit, joined=self.joined) if len(ids) > limit else prompt
            excess = self._prompting.count(text, chat=chat) - room
            if excess <= 0:
                return text, {"uncut_tokens": len(ids), "max_length": limit, "cut": len(ids) > limit}
            limit -= excess
        raise ValueError(
            f"nothing is left of the prompt: {self._max_positions} positions (or a max_length of "
            f"{self.max_length}) for a template of {template} tokens and an answer of {new_tokens}"
        )


class LongBench(_Documents):
    """The task `longbench:hotpotqa` and so on.

    `data`: a folder with `hotpotqa.jsonl` (or .parquet), or with the published archive's folder `data`; None:
    the hub, a mirror that needs no script.
    """

    fields: dict[str, type] = {"input": str, "context": str, "answers": list}  # noqa: RUF012
    joined = False

    def __init__(self, name: str, prompting: Prompting, max_positions: int, data: Path | None = None) -> None:
        self.name, short = name, name.removeprefix("longbench:")
        files = [f"{short}.jsonl", f"data/{short}.jsonl", f"{short}.parquet"]
        files.append(f"{short}/test-00000-of-00001.parquet")
        hub = ("Xnhyacinth/LongBench", short, "test")
        super().__init__(files, hub, prompting, max_positions, data)
        for number, row in enumerate(self._rows, 1):
            if not row["answers"] or not all(isinstance(answer, str) for answer in row["answers"]):
                raise ValueError(f"{self.source}: row {number}: 'answers' is not a list of texts")
        self._prompt = PROMPTS[short]
        metric = self._prompt.metric
        self.metric = metrics.rouge_l_title() if metric == "rouge-l" else metric

    def sample(self, length: int | None, index: int) -> Sample:
        row, prompt = self._rows[index], self._prompt
        text = prompt.text.format(context=row["context"], input=row["input"])
        facts: dict[str, Any] = {key: row[key] for key in ("_id", "length") if key in row}
        return self._sample(index, text, row["answers"], prompt.max_new_tokens, facts, prompt.chat)

    def score(self, prediction: str, sample: Sample) -> float:
        if self._prompt.first_line:
            prediction = prediction.lstrip("\n").split("\n")[0]
        return metrics.best(_METRICS[self._prompt.metric], prediction, sample.references)


class LongBenchV2(_Documents):
    """The task `longbench-v2`. `data`: a folder with the published `data.json`, or with `longbench-v2.jsonl`
    (or .json, .parquet); None: the hub."""

    name = "longbench-v2"
    metric = "accuracy"
    fields = dict.fromkeys([*V2_PLACEHOLDERS.values(), "answer", *_V2_FACTS], str)
    joined = True
    max_length = V2_MAX_LENGTH

    def __init__(self, prompting: Prompting, max_positions: int, data: Path | None = None) -> None:
        files = ["data.json", *(f"{self.name}{suffix}" for suffix in (".json", ".jsonl", ".parquet"))]
        hub = ("THUDM/LongBench-v2", None, "train")
        super().__init__(files, hub, prompting, max_positions, data)

    def sample(self, length: int | None, index: int) -> Sample:
        row, prompt = self._rows[index], V2_PROMPT
        for placeholder, field in V2_PLACEHOLDERS.items():
            prompt = prompt.replace(placeholder, row[field].strip())
        return self._sample(index, prompt, [row["answer"]], 128, {field: row[field] for field in _V2_FACTS})

    def score(self, prediction: str, sample: Sample) -> float:
        return metrics.best(metrics.choice, prediction, sample.references)


def cut_middle(tokenizer: Any, ids: Sequence[int], length: int, *, joined: bool) -> str:
    """The text of the first and last tokens, `length` in all.

    LongBench's way: two halves, each decoded alone; of an odd length one token less is kept. LongBench-v2's,
    `joined`: decoded as one; of an odd length the second half has one token more."""
    half = length // 2
    halves = (ids[:half], ids[-half:]) if not joined else ([*ids[:half], *ids[-length // 2 :]],)
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in halves)
