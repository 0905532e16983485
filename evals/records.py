"""What is written down of each answer, one JSON object a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """One sample, answered under one rule."""

    task: str
    """As in `Sample`, with its `length` and `index`."""
    length: int | None
    index: int
    policy: str
    """The rule as it was asked for: a policy's name, and what was changed of it, `inertiakv:alpha=0.3`."""
    compression: float | None
    """Share of the prompt that was to be evicted; None for the full cache, and where a budget was given."""
    budget_asked: int | None
    """The budget, where one was given instead."""
    prompt_sha256: str
    prompt_tokens: int
    bos_count: int
    budget: int | None
    """Tokens that the rule may keep of this prompt; None: all."""
    kept_tokens: float
    """Tokens in the cache at the end, a mean over retention sets."""
    cache_bytes: int
    """Of this row's share of the decode cache, as allocated."""
    prediction: str
    references: list[str]
    score: float
    """From 0 to 1."""
    answer_tokens: int
    finish_reason: str
    seconds: dict[str, float]
    """Of the batch it was in, divided by the batch's rows: `prefill` (once for all rules), `first_step`,
    `decode`, `compile`."""
    facts: dict[str, Any]
    """As in `Sample`."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a record another one's repetition."""
        return (self.task, self.length, self.index, self.policy, self.compression, self.budget_asked)
