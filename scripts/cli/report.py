"""What a run was and what came of it: as JSON, and as a table for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inertiakv import EvictionConfig, Generation, Stats
from inertiakv.evals.reporting.table import aligned

FEW_TOKENS = 64
"""A smaller budget than this leaves no model enough of a prompt to answer it."""


@dataclass(frozen=True)
class Run:
    """One policy's answers."""

    model: dict[str, Any]
    policy: str
    eviction: EvictionConfig | None
    generation: Generation
    texts: list[str]
    load_seconds: float
    ids: Sequence[str | float]
    """What each prompt is called: its own id, or its number."""
    kept_positions: Sequence[list[int]] | None = None
    """What it kept of the prompts, where that is asked for."""

    @property
    def remarks(self) -> list[str]:
        """What a user should know who expects that something was evicted, or more kept."""
        stats, ranks = self.generation.stats, self.model["ranks"]
        budgets = [budget for budget in stats.budgets if budget is not None]
        remarks = [f"{failure}; try --dtype bfloat16 or float32" for failure in self.generation.failures()]
        remarks += [f"each of {ranks} ranks has as much cache"] if ranks > 1 else []
        if budgets and not stats.evicted:
            size = f"budget of {max(budgets):,} holds all {max(stats.sequence_tokens):,} tokens"
            remarks.append(f"{self.policy} never evicted: its {size}")
        return remarks

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What there is to say of each prompt."""
        stats, generation = self.generation.stats, self.generation
        columns: dict[str, Sequence[Any]] = {
            "prompt_tokens": stats.prompt_tokens,
            "budget": stats.budgets,
            "kept_tokens": stats.kept_tokens,
            "token_ids": generation.tokens,
            "text": self.texts,
            "finish_reason": generation.finish_reasons,
        }
        if self.kept_positions is not None:
            columns["kept_positions"] = self.kept_positions
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @property
    def named_rows(self) -> list[tuple[str | float, dict[str, Any]]]:
        return list(zip(self.ids, self.rows, strict=True))

    def as_json(self, named: bool) -> dict[str, Any]:
        """Rows have their ids where they are `named`."""
        stats = self.generation.stats
        rate = stats.tokens_per_second
        seconds = {"load": self.load_seconds, **dataclasses.asdict(stats.seconds)}
        return {
            "model": self.model,
            "policy": self.policy,
            "config": None if self.eviction is None else dataclasses.asdict(self.eviction),
            "rows": [
                {"id": id_, **row} if named else row for id_, row in zip(self.ids, self.rows, strict=True)
            ],
            "cache_bytes": stats.cache_bytes,
            "full_cache_bytes": stats.full_cache_bytes,
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "tokens_per_second": rate and round(rate, 3),
            "refreshes": stats.refreshes,
            "evictions": sum(stats.evictions),
            "graphs": stats.graphs.counts(),
        }

    def _lines(self) -> dict[str, str]:
        new = sum(map(len, self.generation.tokens))
        ended = "/".join(dict.fromkeys(self.generation.finish_reasons))
        return {"new tokens": f"{new:,}", **stats_lines(self.generation.stats), "ended by": ended}


def too_few(eviction: EvictionConfig | None, prompt_tokens: Sequence[int]) -> str | None:
    """What to say before an answer of which nothing good is to be expected. The decoder itself warns of a
    share that is too small."""
    budget = None if eviction is None or eviction.protect_prompt else eviction.budget
    if budget is None or budget >= min(FEW_TOKENS, max(prompt_tokens)):
        return None
    return f"{budget} of {max(prompt_tokens):,} tokens kept are too few for a good answer (see --budget)"


def stats_lines(stats: Stats) -> dict[str, str]:
    """What a conversation has come to, for people."""
    seconds, rate = stats.seconds, stats.tokens_per_second
    return {
        "prompt tokens": f"{sum(stats.prompt_tokens):,}",
        "kept tokens": f"{sum(stats.kept_tokens):,}",
        "cache": f"{stats.cache_bytes / 1e6:,.1f} MB",
        "full cache": f"{stats.full_cache_bytes / 1e6:,.1f} MB",
        "refreshes": f"{stats.refreshes:,}",
        "evictions": f"{sum(stats.evictions):,}",
        "tokens/s": "-" if rate is None else f"{rate:.1f}",
        "prefill": f"{seconds.prefill:.1f} s",
        "first step": f"{seconds.first_step:.1f} s",
        "compile": f"{seconds.compile:.1f} s",
        "decode": f"{seconds.decode:.1f} s",
    }


def summary(runs: Sequence[Run]) -> str:
    """A table with a column for each run, and what else is to be said."""
    columns = [{"": run.policy} | run._lines() for run in runs]
    for column in columns[1:]:
        column["prefill"] = "the same"  # one reading
    lines = aligned([[name, *(column[name] for column in columns)] for name in columns[0]])
    lines += [remark for run in runs for remark in run.remarks]
    if len(runs) == 2:
        lines.append(f"agreement: {agreement(*runs):.0%} of the tokens are the same")
    return "\n".join(lines)


def agreement(a: Run, b: Run) -> float:
    """Share of equal token ids, place by place; the rest of a longer answer counts as different."""
    pairs = list(zip(a.generation.tokens, b.generation.tokens, strict=True))
    equal = sum(x == y for left, right in pairs for x, y in zip(left, right, strict=False))
    return equal / sum(max(len(left), len(right)) for left, right in pairs)
