"""What a benchmark consists of: tasks, which make samples and score predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Sample:
    """One question. A task makes the same one for the same seed, length and index, whatever else it makes."""

    task: str
    """`benchmark:name`, as `--tasks` has it: `ruler:vt`."""
    length: int | None
    """The tokens that prompt and answer together may take, where the task makes prompts of any length."""
    index: int
    prompt: str
    """The user's turn."""
    answer_prefix: str
    """How the answer begins: appended after the chat template, and no part of the prediction."""
    references: tuple[str, ...]
    max_new_tokens: int
    facts: dict[str, Any] = field(default_factory=dict)
    """Whatever else its record should tell: the depth of a needle, the difficulty of a question."""
    chat: bool = True
    """Whether the prompt goes into the chat template, where there is one: examples to continue do not."""


class Task(Protocol):
    """A family of samples with one metric."""

    name: str
    """`benchmark:name`."""
    metric: str
    """What `score` computes, as a column's title says it: `qa_f1`, `rouge-l f (rouge 1.0.1)`."""
    lengths: bool
    """Whether it makes prompts of any length. Otherwise its data decide, and `length` is None."""

    def count(self, length: int | None) -> int | None:
        """How many samples there are; None: as many as are asked for."""

    def sample(self, length: int | None, index: int) -> Sample:
        """The sample with this index. Raises ValueError where the length is too short for it."""

    def score(self, prediction: str, sample: Sample) -> float:
        """From 0 to 1. An empty prediction is wrong like any other: 0."""


CountTokens = Callable[[str, str], int]
"""From a user's turn and an answer prefix to the tokens that the model is fed: with the chat template around
the turn, and BOS where the tokenizer puts one."""
