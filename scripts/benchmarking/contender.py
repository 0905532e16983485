"""What is measured, and what a contender has to offer for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from inertiakv.models import Transformer


@dataclass(frozen=True)
class Case:
    """One setting, in which all contenders are measured side by side."""

    model: Transformer
    raw: dict[str, Any]
    """The model's config.json."""
    context: int
    batch: int
    new_tokens: int
    """Tokens that each contender will generate, at most."""
    skip_prefill: bool
    """Fill the prompt's cache with random K and V."""
    compiled: bool
    attention: str

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's prompt: the context, and in a batch evenly spread from there down to half of
        it."""
        if self.batch == 1:
            return [self.context]
        half = self.context - self.context // 2
        return [
            max(1, self.context - row * (self.context - half) // (self.batch - 1))
            for row in range(self.batch)
        ]

    def prompts(self) -> list[list[int]]:
        """Random tokens."""
        generator = torch.Generator().manual_seed(self.context)
        vocab = self.model.config.vocab_size
        return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in self.lengths]


@dataclass(frozen=True)
class Start:
    """What came before the steps that are measured."""

    how: str
    """"prefill", "synthetic prompt", or "evicted cache" where not even a synthetic prompt fits."""
    first_token_ms: float | None = None
    """Prefill and the first token, without compiling. None where there was no prefill."""
    first_step_ms: float | None = None
    """The step that feeds the first token and evicts the prompt down to its budget."""


@dataclass(frozen=True)
class CacheUse:
    kept: list[int]
    """Tokens that each row's cache holds."""
    allocated: int
    """Bytes of K and V, as allocated."""


class Contender(Protocol):
    """An implementation under a rule, in one case."""

    name: str
    period: int
    """Steps after which its kinds of steps repeat."""
    extra: dict[str, Any]
    """What else is to be reported, once it has been measured."""

    def start(self) -> Start:
        """Take in the prompt, choose the first token, and evict. Raises MemoryError where it does not fit."""
        ...

    def steps(self, count: int) -> list[float]:
        """Milliseconds of each of `count` decode steps, or of none but their mean where only that is known
        without slowing them down."""
        ...

    def settled(self) -> None:
        """The steps from here on count, those before were for warming up."""
        ...

    def cache(self) -> CacheUse: ...


@dataclass
class Kinds:
    """Step times by kind, for rules that score at some steps only."""

    refresh: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
