"""State of the rows of a batch, as buffers of a graph: pending token, position, finished or not, sampling.

Shape letters: B batch, C steps between two reads, E end-of-sequence ids, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..requests.sampling import Sampling, sample

READ_EVERY = 32
"""Steps whose tokens are kept on the device before they must be read."""
NO_TOKEN = -1
"""In `history_BC`: the row had ended."""
MAX_EOS_IDS = 64
"""End-of-sequence ids that a row can have: many more than models have, and one size, so that graphs are
shared."""


class BatchState(nn.Module):
    """State of the rows, advanced inside the graph. A finished row does not change."""

    token_B: Tensor
    position_B: Tensor
    fed_B: Tensor
    finished_B: Tensor
    prompt_B: Tensor
    sinks_B: Tensor
    recent_B: Tensor
    spaced_B: Tensor
    history_BC: Tensor
    cursor: Tensor
    eos_E: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor

    def __init__(self, batch: int, device: torch.device) -> None:
        super().__init__()

        def buffer(name: str, *size: int, dtype: torch.dtype = torch.int64, fill: float = 0) -> None:
            self.register_buffer(name, torch.full(size, fill, dtype=dtype, device=device))

        buffer("token_B", batch)  # the last token chosen
        buffer(
            "position_B", batch
        )  # tokens in the cache's sequence so far, so the position of the next one fed
        buffer("fed_B", batch, dtype=torch.bool, fill=1)  # whether the last token is in the cache already
        buffer("finished_B", batch, dtype=torch.bool)
        # The prompt's tokens, and the positions protected by it: at the start, at the end, spaced over the
        # prompt.
        buffer("prompt_B", batch)
        buffer("sinks_B", batch)
        buffer("recent_B", batch)
        buffer("spaced_B", batch)
        buffer("history_BC", batch, READ_EVERY, fill=NO_TOKEN)
        buffer("cursor")
        buffer("eos_E", MAX_EOS_IDS, fill=NO_TOKEN)
        buffer("temperature_B", batch, dtype=torch.float32, fill=1)
        buffer("top_k_B", batch)
        buffer("top_p_B", batch, dtype=torch.float32, fill=1)
        buffer("min_p_B", batch, dtype=torch.float32)
        buffer("seed_B", batch)

    def start(self, prompt_tokens: Sequence[int], protection: Sequence[tuple[int, int, int]]) -> None:
        """Reset, for prompts of these lengths. `protection`: how many positions are protected in each row,
        see `EvictionConfig.protection_for`."""
        for tensor in (self.token_B, self.position_B, self.finished_B, self.cursor):
            tensor.zero_()
        self.fed_B.fill_(True)
        self.prompt_B.copy_(torch.tensor(prompt_tokens))
        for buffer, numbers in zip(
            (self.sinks_B, self.recent_B, self.spaced_B), zip(*protection, strict=True), strict=True
        ):
            buffer.copy_(torch.tensor(numbers))

    def configure(self, sampling: Sampling, eos_ids: Sequence[int], vocab_size: int) -> None:
        """Set how tokens are chosen and which ids end a row. Raises ValueError for too many ids."""
        self.eos_E.fill_(NO_TOKEN)
        self.eos_E[: len(eos_ids)] = torch.tensor(list(eos_ids), dtype=torch.int64)
        self.temperature_B.fill_(sampling.temperature or 1.0)
        self.top_k_B.fill_(min(sampling.top_k or vocab_size, vocab_size))
        self.top_p_B.fill_(1.0 if sampling.top_p is None else sampling.top_p)
        self.min_p_B.fill_(sampling.min_p or 0.0)
        self.seed_B.copy_(torch.tensor(sampling.seeds(len(self.token_B)), dtype=torch.int64))

    def choose(self, logits_BV: Tensor, *, greedy: bool) -> None:
        """Take each active row's next token from its logits, enter it into the history and end rows at an
        end-of-sequence id. Runs inside the graph."""
        logits_BV = logits_BV.float()
        if greedy:
            token_B = logits_BV.argmax(-1)
        else:
            token_B = sample(
                logits_BV,
                temperature_B=self.temperature_B,
                top_k_B=self.top_k_B,
                top_p_B=self.top_p_B,
                min_p_B=self.min_p_B,
                seed_B=self.seed_B,
                position_B=self.position_B,
            )
        active_B = ~self.finished_B
        self.history_BC.index_copy_(1, self.cursor[None], torch.where(active_B, token_B, NO_TOKEN)[:, None])
        self.cursor.copy_((self.cursor + 1) % READ_EVERY)
        self.token_B.copy_(torch.where(active_B, token_B, self.token_B))
        self.fed_B.logical_and_(self.finished_B)
        self.finished_B.logical_or_(active_B & (token_B[:, None] == self.eos_E).any(-1))

    def read(self, steps: int) -> list[list[int]]:
        """The tokens of the last `steps` steps, step by step, `NO_TOKEN` where a row had ended. Waits for the
        device."""
        history_BC = self.history_BC.cpu()
        end = int(self.cursor)
        return [history_BC[:, (end - steps + i) % READ_EVERY].tolist() for i in range(steps)]
