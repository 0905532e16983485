"""What a benchmark consists of: tasks, which make samples and score predictions; and how a model is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from inertiakv.models.encoding import chat_text, check_template_args, encode_text


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

Template = Literal["chat", "none"]


@dataclass(frozen=True)
class Prompting:
    """How prompts are put to one model. `template`: `chat` for the tokenizer's own chat template, `none` for
    the text as it is. `args`: what the chat template is given beside messages. The answer prefix comes after
    the template: it begins the model's turn."""

    tokenizer: Any
    template: Template
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template == "chat" and not self.tokenizer.chat_template:
            raise ValueError("this model's tokenizer has no chat template: give --template none")
        if self.template == "chat":
            check_template_args(self.tokenizer, self.args)
        elif self.args:
            raise ValueError("template arguments have no effect with --template none")

    def encode(self, prompt: str, answer_prefix: str = "", *, chat: bool = True) -> list[int]:
        """Token ids, with exactly one BOS where the tokenizer puts one. `chat=False`: no template."""
        if self.template == "chat" and chat:
            prompt = chat_text(self.tokenizer, [{"role": "user", "content": prompt}], template_args=self.args)
        return encode_text(self.tokenizer, prompt + answer_prefix)

    def count(self, prompt: str, answer_prefix: str = "", *, chat: bool = True) -> int:
        """Tokens that `encode` gives."""
        return len(self.encode(prompt, answer_prefix, chat=chat))

    def count_bos(self, ids: Sequence[int]) -> int:
        """How many BOS are among these ids: 0 where the tokenizer has none, else 1, or more where the chat
        template begins every message with it."""
        bos = self.tokenizer.bos_token_id
        return 0 if bos is None else ids.count(bos)


def prompt_hash(ids: Sequence[int]) -> str:
    """SHA-256 of token ids: equal for equal prompts, whatever text and tokenizer they come from."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
