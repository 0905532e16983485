"""The loop of an answer: run decode steps, read their tokens from the device now and then, end rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..cache.slot_cache import bucket
from ..requests.sampling import Sampling
from .batch import NO_TOKEN
from .conversation import Conversation

Stop = Callable[[int, list[int]], bool]
"""Called with a row and the tokens of its answer so far; True ends the row."""


class Step(NamedTuple):
    """A step whose tokens have not been read."""

    before: tuple[int, int, int]  # the counts: decode steps, refreshes, steps of the turn
    timed: bool  # its time is decoding, and not compilation


@dataclass(eq=False)
class GenerationLoop:
    """An answer of at most `max_new_tokens` a row. `eos`: the ids that end a row. `read_every`: steps between
    two reads."""

    conversation: Conversation
    max_new_tokens: int
    sampling: Sampling
    eos: Sequence[int]
    stop: Stop | None
    read_every: int

    def tokens(self) -> Iterator[list[int]]:
        """One list of tokens a step, `NO_TOKEN` for a row that has ended. To be followed by `settle`, however
        soon it is left."""
        conversation, stats = self.conversation, self.conversation.stats
        conversation.rows.configure(self.sampling, self.eos, conversation.engine.model.config.vocab_size)
        conversation.make_room(self.max_new_tokens)
        answer: list[list[int]] = [[] for _ in range(stats.batch)]
        for unread in self._steps():
            with conversation.timed("decode"):
                history = conversation.rows.read(len(unread))
            for step, tokens in zip(unread, history, strict=True):
                if all(token == NO_TOKEN for token in tokens):
                    # It and those after it ran when every row had ended, and changed nothing.
                    stats.decode_steps, stats.refreshes, conversation.turn_step = step.before
                    return
                if step.timed:
                    stats.timed_tokens += sum(token != NO_TOKEN for token in tokens)
                self._end_rows(answer, tokens)
                yield tokens

    def settle(self) -> None:
        """Leave the cache within its budget, and complete the stats. An answer of a single token has not
        taken the first step, in which its prompt is scored and evicted; it is taken here."""
        conversation = self.conversation
        if conversation.first_step_is_due:
            conversation.evict_to_budget(self.max_new_tokens)
            conversation.check_ranks()
        cache, stats, engine = conversation.cache, conversation.stats, conversation.engine
        stats.sequence_tokens = conversation.rows.position_B.tolist()
        stats.kept_tokens = [int(n) if n.is_integer() else n for n in cache.mean_B.tolist()]
        stats.cache_bytes = cache.allocated_bytes
        full = engine.buffers.shape(stats.batch, bucket(max(stats.sequence_tokens) + 1))
        stats.full_cache_bytes = full.nbytes(cache.dtype)
        stats.graphs = replace(engine.graphs.stats)

    def _steps(self) -> Iterator[list[Step]]:
        """Run the steps; yields those whose tokens are to be read now."""
        conversation, greedy = self.conversation, self.sampling.greedy
        rows, stats = conversation.rows, conversation.stats
        unread: list[Step] = []
        if bool(rows.finished_B.all()):
            return
        for index in range(self.max_new_tokens):
            if conversation.first_step_is_due:
                conversation.evict_to_budget(self.max_new_tokens)
            before = (stats.decode_steps, stats.refreshes, conversation.turn_step)
            if conversation.logits_BV is not None:
                rows.choose(conversation.logits_BV, greedy=greedy)
                conversation.logits_BV = None
                timed = False
            else:
                timed = conversation.decode_step(greedy)
            conversation.check_ranks()
            unread.append(Step(before, timed))
            if len(unread) == self.read_every or index == self.max_new_tokens - 1:
                yield unread
                unread = []
                if bool(rows.finished_B.all()):
                    return

    def _end_rows(self, answer: list[list[int]], tokens: list[int]) -> None:
        """Append a step's tokens to the rows' answers, and end those rows where `stop` says so."""
        for row, token in enumerate(tokens):
            if token == NO_TOKEN:
                continue
            answer[row].append(token)
            if self.stop is not None and self.stop(row, answer[row]):
                self.conversation.rows.finished_B[row] = True
                self.conversation.stopped.add(row)
