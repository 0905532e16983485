"""Tasks about long documents: published questions, on texts that are cut to what a model takes."""

from __future__ import annotations

from typing import Any

from .prompting import Prompting
from .rows import Rows
from .task import Sample
from .truncation import Cut, fit


class Documents:
    """What such tasks have in common. `source` says where the rows come from."""

    name: str
    lengths = False

    def __init__(self, rows: Rows, prompting: Prompting, max_positions: int, max_length: int | None):
        self.source = rows.source
        self._rows = rows.rows
        self._prompting = prompting
        self._max_positions = max_positions
        self._max_length = max_length

    def count(self, length: int | None) -> int:
        return len(self._rows)

    def _cut_sample(
        self,
        index: int,
        prompt: str,
        cut: Cut,
        *,
        references: tuple[str, ...],
        max_new_tokens: int,
        facts: dict[str, Any],
        chat: bool = True,
    ) -> Sample:
        """With the prompt as `fit` leaves it, and what it says of that among the facts."""
        prompt, done = fit(
            prompt,
            cut,
            self._prompting,
            max_new_tokens=max_new_tokens,
            max_positions=self._max_positions,
            max_length=self._max_length,
            chat=chat,
        )
        return Sample(
            task=self.name,
            length=None,
            index=index,
            prompt=prompt,
            answer_prefix="",
            references=references,
            max_new_tokens=max_new_tokens,
            facts=facts | done,
            chat=chat,
        )
