"""A chat: messages in, text out, with a cache that each turn leaves within its budget."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from ..config import EvictionConfig
from ..decoder import Decoder
from ..decoding.admission import check_options
from ..decoding.prefill import Progress
from ..model import LanguageModel
from ..requests.sampling import Sampling
from ..requests.text import TextStream
from .encoding import chat_text, decode_answer, encode_text
from .files import check_text

_ANSWER = "\N{REFERENCE MARK}the answer\N{REFERENCE MARK}"
"""Stands for the last answer where a template is asked for what follows it."""
_GREEDY = Sampling()
Pieces: TypeAlias = Generator[str, None, None]


class Chat:
    """Asks a model one message after the other:

        chat = Chat(model, tokenizer, policy("rehearsed"))
        print(chat.say("Why is the sea salty?"))

    A message is read behind what the cache has kept of those before it. After an error, or where another rule
    is asked for, the next message is read together with all of them.

    * `eviction`, `options`: of its `Decoder`.
    * `system`: a message that says how to answer.
    * `messages`: all so far, as chat templates take them.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,
        eviction: EvictionConfig | None = EvictionConfig(),  # noqa: B008 (immutable)
        *,
        system: str | None = None,
        **options: Any,
    ) -> None:
        self.decoder = Decoder(model, eviction, **options)
        self.tokenizer, self.system = tokenizer, system
        self.clear()

    def clear(self) -> None:
        """Forget all messages."""
        self._latest: list[dict[str, str]] = []  # those that are answered now, or were last
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.reread()

    def use(self, eviction: EvictionConfig | None) -> None:
        """Go by another rule, which everything is read anew for."""
        self.decoder.use(eviction)
        self.reread()

    def reread(self) -> None:
        """Read all messages anew with the next one: what was evicted for one question is there for the
        next."""
        self._answer: list[int] | None = None  # the last one's tokens, where the cache goes on from them

    def say(
        self,
        text: str,
        max_new_tokens: int = 512,
        *,
        sampling: Sampling = _GREEDY,
        progress: Progress | None = None,
    ) -> str:
        """The answer to a message. Raises as `stream` does."""
        return "".join(self.stream(text, max_new_tokens, sampling=sampling, progress=progress))

    def stream(
        self,
        text: str,
        max_new_tokens: int = 512,
        *,
        sampling: Sampling = _GREEDY,
        progress: Progress | None = None,
    ) -> Pieces:
        """The answer to a message, piece by piece. Where it is left early, the pieces so far are the answer.

        `max_new_tokens`: at most; fewer where the model has no more positions. Raises as `Decoder.generate`
        does, and ValueError for a message that there are no positions for, all at the first piece. A message
        that fails is no part of the chat, nor is one that another has come before the end of."""
        if not isinstance(text, str):
            raise ValueError(f"a message is a text, got {text!r:.80}")
        check_text(text, "the message")
        check_options(1, max_new_tokens, sampling)
        messages = [*self.messages, {"role": "user", "content": text}]
        turn = self._turn(messages)
        self._answer, self._latest = None, messages
        if turn is None:
            prompt = encode_text(self.tokenizer, chat_text(self.tokenizer, messages))
            new = self._room(len(prompt), max_new_tokens)
            self.decoder.prefill(prompt, max_new_tokens=new, progress=progress)
        else:
            new = self._room(self.decoder.stats.sequence_tokens[0] + 1 + len(turn), max_new_tokens)
            self.decoder.extend(turn, max_new_tokens=new, progress=progress)
        yield from self._pieces(messages, new, sampling)

    def _turn(self, messages: list[dict[str, str]]) -> list[int] | None:
        """The tokens that the last message adds to those in the cache; None where all have to be read."""
        if self._answer is None or self.decoder.cache is None:
            return None
        answered = [*messages[:-2], {"role": "assistant", "content": _ANSWER}, messages[-1]]
        before, *after = chat_text(self.tokenizer, answered).split(_ANSWER)
        if not before or len(after) != 1:  # the template leaves former answers out, or changes them
            return None
        turn: list[int] = self.tokenizer(after[0], add_special_tokens=False)["input_ids"]
        ended = (
            bool(self._answer) and turn[:1] == self._answer[-1:]
        )  # by the token that the template has there
        return turn[1:] if ended else turn

    def _room(self, taken: int, max_new_tokens: int) -> int:
        room = self.decoder.model.config.max_positions - taken
        if room < 1:
            raise ValueError(
                f"the chat comes to {taken:,} tokens, and the model has {taken + room:,} positions: clear it"
            )
        return min(max_new_tokens, room)

    def _pieces(self, messages: list[dict[str, str]], new: int, sampling: Sampling) -> Pieces:
        answer: list[int] = []
        text, eos_ids = TextStream(self.tokenizer), self.decoder.model.config.eos_token_ids
        tokens = self.decoder.stream_answer(new, sampling=sampling)
        try:
            for token in tokens:
                assert isinstance(token, int)
                answer.append(token)
                if token not in eos_ids and (piece := text.push(token)):
                    yield piece
            if piece := text.end():
                yield piece
        finally:
            if self.decoder.cache is not None and self._latest is messages:  # else it has failed
                content = decode_answer(self.tokenizer, answer, eos_ids)
                self.messages = [*messages, {"role": "assistant", "content": content}]
                self._answer = answer
