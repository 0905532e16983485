"""From a sample to the token ids that a model is fed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from inertiakv.models.encoding import chat_text, check_template_args, encode_text

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
