"""The tokens of a text, and what a run made of each of them: when it came and went, its worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inertiakv.scripts.cli.kept import marked, pieces

from .runs import Run

LEVELS = 8


@dataclass(frozen=True)
class Token:
    text: str
    utility: float
    """The last one that it had; NaN where it went before the first step."""
    gone: int | None
    """The step, from 1, at which it was evicted, 0 for before that. None for a token that is kept."""
    since: int = 0
    """The step that fed it; 0 for a token of the prompt."""

    def stayed(self, steps: int) -> int:
        """After how many of these steps the cache held it."""
        end = steps + 1 if self.gone is None else self.gone
        return max(0, end - max(1, self.since))


@dataclass(frozen=True)
class TracedText:
    """A prompt and its answer, and what a run kept of them at its end."""

    title: str
    tokens: list[Token]

    @property
    def levels(self) -> list[int]:
        """The level of each token by the rank of its utility, all of the same size; equals share one."""
        utilities = [-math.inf if math.isnan(token.utility) else token.utility for token in self.tokens]
        rank = {utility: i for i, utility in enumerate(sorted(utilities))}
        return [LEVELS * rank[utility] // len(utilities) for utility in utilities]

    @property
    def heading(self) -> str:
        kept = sum(token.gone is None for token in self.tokens)
        return f"{self.title}: {kept:,} of {len(self.tokens):,} tokens are kept"


def traced_text(title: str, tokenizer: Any, prompt: Sequence[int], run: Run) -> TracedText:
    """Of a run that evicts."""
    utility_TP, kept_P = run.trace.utility_TP, run.cached_TP[-1]
    step_T1 = torch.arange(1, run.trace.steps + 1)[:, None]
    last_P = (run.trace.present_TP * step_T1).amax(0)  # from 1; 0 for a token that no step saw
    utilities = utility_TP[last_P - 1, torch.arange(len(last_P))].tolist()
    gone = [None if kept else last for kept, last in zip(kept_P.tolist(), last_P.tolist(), strict=True)]
    texts = pieces(tokenizer, [*prompt, *run.tokens[: run.trace.steps]])
    since = [max(0, position + 1 - len(prompt)) for position in range(len(texts))]
    return TracedText(title, [Token(*token) for token in zip(texts, utilities, gone, since, strict=True)])


def terminal(traced: TracedText) -> str:
    """The text, with a count in the place of what was evicted."""
    texts, kept = [token.text for token in traced.tokens], [token.gone is None for token in traced.tokens]
    return f"{traced.heading}\n{marked(texts, kept)}"
