"""One process of a run, alone, or among several that share its samples, or those and their model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from inertiakv.evals.records import Record, RecordFile, read_records
from inertiakv.evals.run import Evaluation, Group
from inertiakv.models.parallel import check_groups, place
from inertiakv.scripts.cli.program import say

from . import meta

EVERY = 30
"""Seconds between two lines, where there is no terminal for a bar."""


def record_bar(who: str, done: int, total: int) -> tqdm:
    """Progress in records. Without smoothing: they come in batches, and rules differ in speed."""
    every = 0.1 if sys.stderr.isatty() else EVERY
    return tqdm(total=total, initial=done, desc=who, unit=" records", smoothing=0, mininterval=every)


@dataclass(frozen=True)
class Process:
    """By torchrun's environment. It answers the samples whose index leaves its rank when divided by the
    number of ranks, and does not talk to others; where `size` processes hold a model together such a group
    counts as one, whose first process writes."""

    rank: int
    ranks: int
    size: int = 1

    @classmethod
    def here(cls, size: int) -> Process:
        """Raises ValueError for an environment that says something else, or processes that do not go into
        groups of `size`."""
        index, number, _ = place()
        check_groups(size, number)
        return cls(index // size, number // size, size)

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
        which = "rank" if self.size == 1 else "group"
        return "eval" if self.ranks == 1 else f"eval, {which} {self.rank} of {self.ranks}"


def run(
    evaluation: Evaluation,
    groups: Sequence[Group],
    folder: Path,
    process: Process,
    about: dict[str, Any],
    *,
    resume: bool,
) -> list[Record]:
    """Make the records of this process's share that are not there yet. All of the run that are there in the
    end, by whatever process; the one that has made the last of them notes when."""
    model, mine = evaluation.model, process.share(groups)
    say(f"{process}: looking at the prompts ...")
    evaluation.check(mine)
    with contextlib.ExitStack() as stack:
        file = None
        if model.tp.rank == 0:
            meta.check(folder, about, resume=resume)
            folder.mkdir(parents=True, exist_ok=True)
            # Before it is described: a run that another process is at stays as that one has done so.
            file = stack.enter_context(contextlib.closing(RecordFile(folder / process.file_name)))
            for change in meta.start(folder, about, resume=resume, note=process.rank == 0):
                say(f"note: since this run began, {change}")
        done = {record.key for record in read_records(folder)}
        model.tp.sum(torch.zeros(1, device=model.device))  # all have read before one writes more
        wanted = [key for group in mine for key in group.keys(evaluation.rules)]
        bar = record_bar(str(process), sum(key in done for key in wanted), len(wanted))
        with contextlib.closing(bar):
            for record in evaluation.answer(mine, done):
                if file is not None:
                    file.append(record)
                bar.update()
    records = read_records(folder)
    if model.tp.rank == 0:
        meta.finish(folder, about, records)
    found = {record.key: record for record in records}
    asked = (key for group in groups for key in group.keys(evaluation.rules))
    return [found[key] for key in asked if key in found]
