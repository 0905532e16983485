"""Results of a generation: tokens, finish reasons, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..compiling.graphs import GraphStats

FinishReason = Literal["eos", "stop", "length", "not_finite"]
"""`not_finite`: the logits of the next token were NaN or infinite."""


@dataclass
class Seconds:
    """Wall-clock seconds. `compile` is what first calls of graphs took, and in none of the others."""

    compile: float = 0.0
    prefill: float = 0.0
    first_step: float = 0.0
    decode: float = 0.0


@dataclass
class Stats:
    """What a generation did. Lists have one entry a row; counts are since the prompt, over all turns."""

    prompt_tokens: list[int]
    budgets: list[int | None]
    """Tokens each row may keep, None for the full cache."""
    sequence_tokens: list[int] = field(default_factory=list)
    """Tokens that went through the cache, evicted or not."""
    kept_tokens: list[float] = field(default_factory=list)
    """Tokens that the cache holds now, in the mean over the row's retention sets."""
    refreshes: int = 0
    decode_steps: int = 0
    """Steps run from the compiled loop, without the first one."""
    timed_tokens: int = 0
    """Tokens that the steps in `seconds.decode` chose: those of all rows and steps that compiled nothing."""
    cache_bytes: int = 0
    """Bytes of K and V as allocated now, by this process."""
    full_cache_bytes: int = 0
    """Bytes that K and V of the full cache would take, allocated the same way."""
    seconds: Seconds = field(default_factory=Seconds)
    graphs: GraphStats = field(default_factory=GraphStats)

    @property
    def batch(self) -> int:
        return len(self.prompt_tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all rows that the decode loop chooses a second, None where it was not timed."""
        return self.timed_tokens / self.seconds.decode if self.timed_tokens else None

    @property
    def evictions(self) -> list[float]:
        """Tokens evicted since the prompt, in the mean over the row's retention sets."""
        return [all_ - kept for all_, kept in zip(self.sequence_tokens, self.kept_tokens, strict=True)]

    @property
    def evicted(self) -> bool:
        """Whether anything was evicted at all."""
        return any(self.evictions)


@dataclass
class Generation:
    """Generated tokens and why each row ended. `tokens` includes the end-of-sequence id where one was
    chosen."""

    tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    stats: Stats

    def failures(self) -> list[str]:
        """What to say of each row that ended since its logits were not finite."""
        return [
            f"logits are not finite in row {row} from token {len(self.tokens[row]) + 1} on"
            for row, reason in enumerate(self.finish_reasons)
            if reason == "not_finite"
        ]
