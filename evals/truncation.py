"""Prompts that are too long lose their middle, as LongBench does it: both ends may hold the instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .prompting import Prompting

Cut = Callable[[Any, Sequence[int], int], str]
"""From a tokenizer, the ids of a text and the number of tokens to keep to the text that is left."""


def cut_halves(tokenizer: Any, ids: Sequence[int], length: int) -> str:
    """LongBench's way: two halves, each decoded alone; of an odd length one token less is kept."""
    half = length // 2
    return _decode(tokenizer, ids[:half]) + _decode(tokenizer, ids[-half:])


def cut_joined(tokenizer: Any, ids: Sequence[int], length: int) -> str:
    """LongBench-v2's way: decoded as one; of an odd length the second half has one token more."""
    return _decode(tokenizer, [*ids[: length // 2], *ids[-length // 2 :]])


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def fit(
    prompt: str,
    cut: Cut,
    prompting: Prompting,
    *,
    max_new_tokens: int,
    max_positions: int,
    max_length: int | None,
    chat: bool = True,
) -> tuple[str, dict[str, Any]]:
    """The prompt, cut in the middle where it must be, and the facts: how many tokens it had, how many it may
    have, and whether it was cut.

    max_length: tokens of the prompt before the chat template, BOS among them, as the benchmark's own scripts
        count; None: what the model's positions leave beside template and answer. It is never more than that.

    Text that is decoded and encoded again may come to a few tokens more: then a little more is cut.
    Raises ValueError where the model has no positions to spare."""
    tokenizer = prompting.tokenizer
    ids = tokenizer(prompt, verbose=False)["input_ids"]
    template = prompting.count("", chat=chat) - len(tokenizer("")["input_ids"])
    room = max_positions - max_new_tokens
    limit = room - template if max_length is None else min(room - template, max_length)
    while limit >= 2:
        text = cut(tokenizer, ids, limit) if len(ids) > limit else prompt
        excess = prompting.count(text, chat=chat) - room
        if excess <= 0:
            return text, {"uncut_tokens": len(ids), "max_length": limit, "cut": len(ids) > limit}
        limit -= excess
    raise ValueError(
        f"nothing is left of the prompt: {max_positions} positions (or a max_length of {max_length}) "
        f"for a template of {template} tokens and an answer of {max_new_tokens}"
    )
