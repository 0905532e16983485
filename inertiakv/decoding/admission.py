"""What is checked before any work: whether a request can be, and fits."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from numbers import Integral

from ..cache.budgets import Budgets
from ..cache.slot_cache import bucket
from ..config import SMALLEST_BUFFER, check_int
from ..requests.prompts import check_positions
from ..requests.sampling import Sampling
from .batch import MAX_EOS_IDS
from .generation import Conversation
from .needs import Request
from .runtime import Runtime

log = logging.getLogger(__name__)
FEW_TOKENS = 32
"""Fewer than these leave no model enough of a prompt to answer it."""


def check_options(
    rows: int,
    max_new_tokens: int,
    sampling: Sampling,
    eos_token_ids: Sequence[int] | None = None,
    stop: object = None,
) -> None:
    """Raise ValueError for options of an answer of so many rows that cannot be."""
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling is a Sampling(temperature=..., ...), got {sampling!r}")
    check_int("max_new_tokens", max_new_tokens, 1)
    sampling.seeds(rows)
    if stop is not None and not callable(stop):
        raise ValueError(f"stop is a function, as StopStrings(tokenizer, strings) is one, got {stop!r}")
    eos = () if eos_token_ids is None else eos_token_ids
    if not isinstance(eos, Collection) or not all(isinstance(token, Integral) for token in eos):
        raise ValueError(f"eos_token_ids are token ids, got {eos!r:.80}")
    if len(eos) > MAX_EOS_IDS:
        raise ValueError(f"{len(eos)} end-of-sequence ids; at most {MAX_EOS_IDS} are supported")


class Admission:
    """Raises ValueError for what cannot be, and MemoryError, with an estimate, for what does not fit."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._warned = runtime, False

    def check_answer(
        self,
        conversation: Conversation,
        max_new_tokens: int,
        sampling: Sampling,
        eos_token_ids: Sequence[int] | None,
        stop: object,
    ) -> None:
        """Of an answer to a conversation."""
        model, buffers, cache = self._runtime.model, self._runtime.buffers, conversation.cache
        buffers.check_place(model)
        check_options(conversation.stats.batch, max_new_tokens, sampling, eos_token_ids, stop)
        check_positions(conversation.batch.position_B.tolist(), max_new_tokens, model.config.max_positions)
        slots = cache.slots_for(max_new_tokens)
        if conversation.overfull or cache.shape.slots < slots:
            buffers.require_cache("decode cache", conversation.stats.batch, slots)

    def admit(
        self,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        before: Conversation | None,
    ) -> Budgets:
        """The budgets of prompts, where they can be read and answered in the place of the conversation
        `before`."""
        runtime, model, lengths = self._runtime, self._runtime.model, [len(row) for row in rows]
        budgets = Budgets(runtime.rule.config, lengths, model.config.num_layers)
        self._warn_of_small_shares(budgets)
        drafted = runtime.drafted if budgets.overfull else 0
        # A draft follows the answer's first token.
        check_positions(lengths, max_new_tokens, model.config.max_positions, drafted + 1 if drafted else 0)
        runtime.buffers.check_place(model)
        request = Request(
            batch=len(lengths),
            longest=max(lengths),
            tokens=max(lengths),
            even=len(set(lengths)) == 1,
            chunk=runtime.prefill.chunk,
            prompt_slots=bucket(max(lengths) + drafted + 1) if budgets.overfull else 0,
            decode_slots=self.slots(budgets, max_new_tokens),
            prefix=len(runtime.repeat_prefix),
            greedy=sampling.greedy,
        )
        runtime.buffers.require(runtime.needs, request, 0 if before is None else before.own_bytes)
        return budgets

    def admit_turn(
        self, conversation: Conversation, rows: list[list[int]], totals: list[int], max_new_tokens: int
    ) -> None:
        """Of a turn, after which the rows have had `totals` tokens, and of its answer."""
        runtime, model = self._runtime, self._runtime.model
        check_positions(totals, max_new_tokens, model.config.max_positions, runtime.drafted)
        runtime.buffers.check_place(model)
        tokens = conversation.tokens_with_turn(rows, max_new_tokens)
        evicts, longest = runtime.rule.config is not None, max(map(len, rows))
        request = Request(
            batch=len(rows),
            longest=longest,
            tokens=tokens,
            even=False,
            chunk=runtime.prefill.chunk,
            prompt_slots=bucket(tokens + 1) if evicts else 0,
            # Where nothing is evicted the answer stays in the turn's cache.
            decode_slots=conversation.cache.slots_for(longest + max_new_tokens)
            if evicts
            else bucket(tokens + 1),
            prefix=len(runtime.repeat_prefix),
        )
        runtime.buffers.require(runtime.needs, request)

    def slots(self, budgets: Budgets, max_new_tokens: int) -> int:
        """Of the decode cache."""
        drafted = self._runtime.drafted if budgets.overfull else 0
        return budgets.decode_slots(max(max_new_tokens, drafted))

    def _warn_of_small_shares(self, budgets: Budgets) -> None:
        """Say once where a share of a short prompt is next to nothing."""
        config = self._runtime.rule.config
        if self._warned or config is None or config.budget is not None:
            return
        kept, length = min(zip(budgets.rows, budgets.lengths, strict=True))
        if kept < min(FEW_TOKENS, length):
            self._warned = True
            log.warning(
                "compression=%s keeps %d of a prompt of %d tokens, too few to answer from: give budget, or "
                "min_budget=%d, which costs no memory",
                *(config.compression, kept, length, SMALLEST_BUFFER),
            )
