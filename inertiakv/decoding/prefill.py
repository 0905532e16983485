"""Prefill: enters prompts of different lengths into a cache, chunk by chunk.

Shape letters: B batch, T query tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.retention import EMPTY
from ..cache.slot_cache import SlotCache, bucket
from ..compiling.graphs import Graphs
from ..model import LanguageModel
from .decoding_rule import DecodingRule
from .steps import chunk_step

Progress = Callable[[int, int], None]
"""Called with the prompt tokens done and in all."""


@dataclass(frozen=True)
class Prefill:
    """Reads tokens into a cache `chunk` at a time, so that activations do not grow with the prompt.

    Dense chunks run eagerly, since they are bound by matrix products. FlexAttention has to be compiled; its
    chunks are padded to one length, so that one graph serves them all.
    """

    model: LanguageModel
    rule: DecodingRule  # of the full cache: nothing is evicted while a prompt is read
    graphs: Graphs
    chunk: int

    def read(
        self,
        cache: SlotCache,
        rows: list[list[int]],
        slots: list[int],
        positions: list[int],
        progress: Progress | None,
    ) -> Tensor:
        """Enter each row's tokens from slot `slots[b]` and position `positions[b]` on, and move the free
        slot behind them. Returns the last token's hidden state, [B, E]; rows without tokens have no meaning
        there."""
        device, longest = cache.device, max(map(len, rows))
        length_B = torch.tensor([len(row) for row in rows], device=device)
        slot_B1 = torch.tensor(slots, device=device)[:, None]
        position_B1 = torch.tensor(positions, device=device)[:, None]
        token_BT = torch.zeros((len(rows), longest), dtype=torch.int64, device=device)
        for index, row in enumerate(rows):
            token_BT[index, : len(row)] = torch.tensor(row, dtype=torch.int64)

        # `slots` come after each row's fullest set: a mean that is as large says that all sets are.
        even = min(slots) == max(slots) and bool((cache.mean_B == slots[0]).all())
        dense = self.rule.backend == "dense"
        last_BE: Tensor | None = None
        for start in range(0, longest, self.chunk):
            width = min(self.chunk, longest - start)
            padded = width if dense else min(self.chunk, bucket(width))
            offset_T = torch.arange(start, start + padded, device=device)
            real_BT = offset_T < length_B[:, None]
            tokens_BT = token_BT.gather(1, offset_T.clamp_max(longest - 1).expand(len(rows), -1))
            positions_BT = torch.where(real_BT, position_B1 + offset_T, EMPTY)
            # Padding lands in a slot that the row has not reached, the last one at most, which no prompt
            # fills.
            slots_BT = (slot_B1 + offset_T).clamp_max(cache.shape.slots - 1)
            args = (self.model, cache, self.rule, tokens_BT, positions_BT, slots_BT)
            if dense:
                slots_before = slots[0] + start if even else None
                hidden_BTE = chunk_step(*args, max(slots) + start + width, slots_before)
            else:
                key = ("prompt chunk", cache.shape, tokens_BT.shape)
                # Not captured: prompt caches come and go, and chunks are long enough to hide the time of
                # launching.
                hidden_BTE = self.graphs.run(key, chunk_step, *args, None, None, capture=False)
            index_B = (length_B - 1 - start).clamp(0, hidden_BTE.shape[1] - 1)
            ends_B1 = ((length_B > start) & (length_B <= start + width))[:, None]
            chunk_last_BE = hidden_BTE[torch.arange(len(rows), device=device), index_B]
            last_BE = (
                chunk_last_BE.clone() if last_BE is None else torch.where(ends_B1, chunk_last_BE, last_BE)
            )
            if progress is not None:
                progress(sum(min(len(row), start + width) for row in rows), sum(map(len, rows)))
        for sets in cache.retention:
            sets.free_BX.copy_((slot_B1[:, 0] + length_B)[:, None])
        assert last_BE is not None
        return last_BE
