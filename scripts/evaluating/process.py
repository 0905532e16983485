"""One process of a run, alone or among several that share its samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from evals.records import Record, RecordFile, read_records
from evals.run import Evaluation, Group
from scripts.cli.console import say

from . import meta
from .progress import RecordBar, note


@dataclass(frozen=True)
class Process:
    """By torchrun's environment, of which it takes no more: processes do not talk to each other, each one
    answers the samples whose index leaves its rank when divided by the number of them."""

    rank: int
    ranks: int
    local_rank: int | None

    @classmethod
    def here(cls) -> Process:
        """Raises ValueError for an environment that says something else."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        try:
            rank, ranks, local = (int(os.environ[n]) if n in os.environ else None for n in names)
        except ValueError as error:
            raise ValueError(f"{', '.join(names)} must be whole numbers: {error}") from error
        process = cls(rank or 0, 1 if ranks is None else ranks, local)
        if not 0 <= process.rank < process.ranks:
            raise ValueError(f"RANK must be from 0 to WORLD_SIZE - 1, got {process.rank} of {process.ranks}")
        return process

    @property
    def device(self) -> str | None:
        """A GPU of its own, where processes are numbered on their machine."""
        return None if self.local_rank is None or not torch.cuda.is_available() else f"cuda:{self.local_rank}"

    @property
    def file_name(self) -> str:
        return "records.jsonl" if self.ranks == 1 else f"records-{self.rank}.jsonl"

    @property
    def others(self) -> set[str]:
        """The file names of the processes beside this one."""
        return {replace(self, rank=rank).file_name for rank in range(self.ranks) if rank != self.rank}

    def share(self, groups: Sequence[Group]) -> list[Group]:
        return [group.share(self.rank, self.ranks) for group in groups]

    def batch(self, groups: Sequence[Group], most: int) -> int:
        """Prompts at a time, no more than there are of any kind."""
        return max(1, min(most, max(len(group.indices) for group in self.share(groups))))

    def __str__(self) -> str:
        return "eval" if self.ranks == 1 else f"eval, rank {self.rank} of {self.ranks}"


def run(
    evaluation: Evaluation,
    groups: Sequence[Group],
    folder: Path,
    process: Process,
    about: dict[str, Any],
    bar: RecordBar,
    *,
    resume: bool,
) -> list[Record]:
    """Make the records of this process's share that are not there yet. All of the run that are there in the
    end, by whatever process; the one that has made the last of them notes when."""
    mine = process.share(groups)
    say(f"{process}: looking at the prompts ...")
    evaluation.check(mine)
    for change in meta.start(folder, about, resume=resume, note=process.rank == 0):
        note(f"note: since this run began, {change}")
    with contextlib.closing(RecordFile(folder / process.file_name)) as file:
        done = {record.key for record in read_records(folder)}
        wanted = [key for group in mine for key in group.keys(evaluation.rules)]
        bar.begin(sum(key in done for key in wanted), len(wanted))
        with contextlib.closing(bar):
            try:
                for record in evaluation.answer(mine, done):
                    file.append(record)
                    bar.update()
            except KeyboardInterrupt:
                note(f"stopped: {bar.done:,} of {bar.total:,} records are in {folder}; go on with --resume")
                raise
    records = read_records(folder)
    meta.finish(folder, about, records)
    found = {record.key: record for record in records}
    asked = (key for group in groups for key in group.keys(evaluation.rules))
    return [found[key] for key in asked if key in found]
