"""State of the rows of a batch, as buffers of a graph: pending token, position, finished or not, sampling.

Shape letters: B batch, C steps between two reads, E end-of-sequence ids, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.retention import TensorState
from ..requests.sampling import Sampling, sample

READ_EVERY = 32
"""Steps whose tokens are kept on the device before they must be read."""
NO_TOKEN = -1
"""In `history_BC`: the row had ended."""
MAX_EOS_IDS = 64
"""End-of-sequence ids that a row can have: many more than models have, and one size, so that graphs are
shared."""


class BatchState(TensorState):
    """State of the rows, advanced inside the graph. A finished row does not change.

    * `token_B`: the last token chosen; `fed_B`: whether it is in the cache already;
    * `position_B`: tokens in the cache's sequence so far, so the position of the next one fed;
    * `prompt_B`: the prompt's tokens; `sinks_B`, `recent_B`, `spaced_B`: the positions protected by it at the
      start, at the end, and spaced over the prompt;
    * `failed_B`: the row has finished since its logits were not finite;
    * `history_BC`, `cursor`: the tokens of the last steps, and where the next step's go.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        super().__init__()
        for name in (
            "token_B",
            "position_B",
            "prompt_B",
            "sinks_B",
            "recent_B",
            "spaced_B",
            "top_k_B",
            "seed_B",
        ):
            self.add(name, torch.zeros(batch, dtype=torch.int64, device=device))
        self.add("fed_B", torch.ones(batch, dtype=torch.bool, device=device))
        self.add("finished_B", torch.zeros(batch, dtype=torch.bool, device=device))
        self.add("failed_B", torch.zeros(batch, dtype=torch.bool, device=device))
        self.add("history_BC", torch.full((batch, READ_EVERY), NO_TOKEN, device=device))
        self.add("cursor", torch.zeros((), dtype=torch.int64, device=device))
        self.add("eos_E", torch.full((MAX_EOS_IDS,), NO_TOKEN, device=device))
        for name, value in (("temperature_B", 1.0), ("top_p_B", 1.0), ("min_p_B", 0.0)):
            self.add(name, torch.full((batch,), value, dtype=torch.float32, device=device))

    def start(self, prompt_tokens: Sequence[int], protection: Sequence[tuple[int, int, int]]) -> None:
        """Reset, for prompts of these lengths. `protection`: how many positions are protected in each row,
        see `EvictionConfig.protection_for`."""
        for tensor in (self.token_B, self.position_B, self.finished_B, self.failed_B, self.cursor):
            tensor.zero_()
        self.fed_B.fill_(True)
        self.prompt_B.copy_(torch.tensor(prompt_tokens))
        sinks, recent, spaced = torch.tensor(protection).unbind(1)
        self.sinks_B.copy_(sinks)
        self.recent_B.copy_(recent)
        self.spaced_B.copy_(spaced)

    def configure(self, sampling: Sampling, eos_ids: Sequence[int], vocab_size: int) -> None:
        """Set how tokens are chosen, and which ids end a row: at most `MAX_EOS_IDS`."""
        self.eos_E.fill_(NO_TOKEN)
        self.eos_E[: len(eos_ids)] = torch.tensor(list(eos_ids), dtype=torch.int64)
        self.temperature_B.fill_(sampling.temperature or 1.0)
        self.top_k_B.fill_(min(sampling.top_k or vocab_size, vocab_size))
        self.top_p_B.fill_(1.0 if sampling.top_p is None else sampling.top_p)
        self.min_p_B.fill_(sampling.min_p or 0.0)
        self.seed_B.copy_(torch.tensor(sampling.seeds(len(self.token_B)), dtype=torch.int64))

    def choose(self, logits_BV: Tensor, *, greedy: bool) -> None:
        """Take each active row's next token from its logits, enter it into the history and end rows at an
        end-of-sequence id. A row whose logits are not finite ends without a token. Runs inside the graph."""
        logits_BV = logits_BV.float()
        if greedy:
            token_B = logits_BV.argmax(-1)
        else:
            filters = (self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B)
            token_B = sample(logits_BV, *filters, self.seed_B, self.position_B)
        # NaN counts as the largest: where any logit is not finite, the chosen one is not.
        finite_B = logits_BV.gather(-1, token_B[:, None])[:, 0].isfinite()
        self.failed_B.logical_or_(~self.finished_B & ~finite_B)
        self.finished_B.logical_or_(self.failed_B)
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
