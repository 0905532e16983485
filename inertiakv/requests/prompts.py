"""Prompts as token ids, checked before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Number

from torch import Tensor

from ..config import check_int

Prompts = Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt, a flat sequence of token ids, and not a batch."""
    if isinstance(prompts, Tensor):
        return prompts.dim() == 1
    return len(prompts) > 0 and isinstance(prompts[0], Number)


def to_rows(prompts: Prompts, vocab_size: int, what: str = "prompt") -> list[list[int]]:
    """Prompts as one new list of token ids a row. Raises ValueError for one that is no sequence, is empty or
    has an unknown id."""
    if isinstance(prompts, Mapping):  # what a tokenizer returns
        raise ValueError(
            f"a {what} is a list of token ids, got a {type(prompts).__name__}: give its input_ids"
        )
    if isinstance(prompts, str) or (
        _is_sequence(prompts) and any(isinstance(prompt, str) for prompt in prompts)
    ):
        raise ValueError(f"a {what} is a list of token ids, got text: give tokenizer(text).input_ids")
    batch = prompts if _is_sequence(prompts) and not is_single(prompts) else [prompts]
    for row in batch:
        if not _is_sequence(row):
            raise ValueError(f"a {what} is a list of token ids, got {row!r:.80}")
    rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in batch]  # type: ignore[arg-type]
    if not rows:
        raise ValueError(f"no {what}s: the batch is empty")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"{what} {index} has no tokens")
        for token in row:
            if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise ValueError(
                    f"{what} {index} has {token!r}; token ids are whole numbers below {vocab_size}"
                )
    return [[int(token) for token in row] for row in rows]


def _is_sequence(value: object) -> bool:
    """Whether this can be a row or a batch: an array or a tensor, too, if it has an axis."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "ndim", 1) > 0


def check_positions(lengths: Sequence[int], new_tokens: int, max_positions: int, fed: int = 0) -> None:
    """Raise ValueError where a row would outgrow the positions that the model knows, and for `new_tokens`
    that is no number of tokens. `fed`: tokens that are fed for a draft."""
    check_int("max_new_tokens", new_tokens, 0)
    longest = max(lengths)
    if longest > max_positions:
        raise ValueError(f"{longest} tokens are more than the model's {max_positions} positions")
    if longest + new_tokens > max_positions:
        raise ValueError(
            f"{longest} tokens and {new_tokens} new ones exceed the model's {max_positions} positions; "
            f"at most {max_positions - longest} new tokens fit"
        )
    if longest + fed > max_positions:
        raise ValueError(
            f"{longest} tokens and {fed} for a draft exceed the model's {max_positions} positions by "
            f"{longest + fed - max_positions}: give a shorter draft"
        )
