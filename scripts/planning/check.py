"""What `scripts/plan.py` predicts, against what `scripts/bench.py` has measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inertiakv.attention.backend import choose_backend
from inertiakv.models import parse_config
from inertiakv.models.config import parse_dtype
from inertiakv.scripts.benchmarking import results, traffic
from inertiakv.scripts.benchmarking.shapes import SHAPES, shape

from .devices import Kind
from .rank import rank_of
from .speed import Sample, Shares, fit

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@dataclass(frozen=True)
class Measured:
    """A contender of a results file, `predicted` from all of them and `held_out` from those of the other
    settings alone: in milliseconds, None where they do not tell."""

    file: str
    name: str
    dtype: str
    context: int
    batch: int
    sample: Sample
    predicted: float | None = None
    held_out: float | None = None

    @property
    def ms(self) -> float:
        return 1000 * self.sample.seconds

    @property
    def setting(self) -> tuple[str, str, int, int]:
        return self.file, self.dtype, self.context, self.batch

    @property
    def group(self) -> tuple[Kind, str]:
        """Of steps that are described by the same shares."""
        return self.sample.kind, self.sample.weights_in


def measured(files: Sequence[Path]) -> list[Measured]:
    """The policies in results files whose model is a shape; rivals, and their ways, are not predicted."""
    return [row for file in files for row in _rows(results.read(file), file.name)]


def _rows(result: dict[str, Any], file: str) -> Iterator[Measured]:
    about = result.get("model", {})
    if about.get("name") not in SHAPES:
        return
    kind: Kind = "cuda" if result["machine"]["device"].startswith("cuda") else "cpu"
    config = parse_config(shape(about["name"], about["layers"]))
    for dtype in dict.fromkeys(contender["dtype"] for contender in result["contenders"]):
        rank = rank_of(config, parse_dtype(dtype), about["quantize"], 1)
        for contender in result["contenders"]:
            if contender["dtype"] != dtype or not _is_ours(contender, kind):
                continue
            bandwidth, batch = 1e9 * contender["read_gb_per_s"], contender["batch"]
            sample = Sample(
                kind,
                about["quantize"] or dtype,
                batch,
                contender["ms_per_step"]["median"] / 1000,
                traffic.weight_bytes(rank.model, batch) / bandwidth,
                contender["cache_bytes"] / bandwidth,
                2 * rank.active * batch,
            )
            yield Measured(file, contender["name"], dtype, contender["context"], batch, sample)


def _is_ours(contender: dict[str, Any], kind: Kind) -> bool:
    """Whether it is a policy, compiled, with the attention that it would have by itself."""
    if not contender.get("graphs", {}).get("compiled") or "merged_from" in contender:
        return False
    usual = choose_backend("auto", torch.device(kind), parse_dtype(contender["dtype"]), compiled=True)
    return contender["attention"] == usual


def predict(rows: Sequence[Measured]) -> list[Measured]:
    """The rows, with what is predicted of each."""
    everything, done = shares_of(rows), []
    for row in rows:
        others = shares_of([other for other in rows if other.setting != row.setting])
        both = (_milliseconds(row.sample, shares.get(row.group)) for shares in (everything, others))
        predicted, held_out = both
        done.append(replace(row, predicted=predicted, held_out=held_out))
    return done


def _milliseconds(sample: Sample, shares: Shares | None) -> float | None:
    """None also for a batch where no batch says how fast arithmetic is."""
    if shares is None or (sample.batch > 1 and shares.flops is None):
        return None
    return 1000 * shares.seconds(sample)


def shares_of(rows: Sequence[Measured]) -> dict[tuple[Kind, str], Shares]:
    """By the kind of device and what the weights are in, where enough was measured."""
    groups: dict[tuple[Kind, str], list[Measured]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    found = {}
    for (kind, weights_in), group in groups.items():
        source = f"from {len(group)} steps measured on {kind} in {weights_in}"
        if shares := fit([row.sample for row in group], source):
            found[kind, weights_in] = shares
    return found


def table(rows: Sequence[Measured]) -> list[list[str]]:
    """Head and lines: what was measured, what is predicted, and by how much that is off."""
    head = ["policy", "file", "dtype", "context", "batch", "ms measured", "ms predicted", "error", "held out"]
    return [head, *(_line(row) for row in rows)]


def _line(row: Measured) -> list[str]:
    predicted = "-" if row.predicted is None else f"{row.predicted:.2f}"
    errors = [error(row.predicted, row.ms), error(row.held_out, row.ms)]
    shown = ["-" if value is None else f"{value:+z.1%}" for value in errors]
    where = [row.name, row.file, row.dtype, f"{row.context:,}", str(row.batch)]
    return [*where, f"{row.ms:.2f}", predicted, *shown]


def error(predicted: float | None, ms: float) -> float | None:
    return None if predicted is None else predicted / ms - 1


def summary(rows: Sequence[Measured]) -> list[str]:
    """Sentences on how far off predictions are, and on the shares that they come from."""
    lines = []
    for what, values in (
        ("from the shares of all settings", [error(row.predicted, row.ms) for row in rows]),
        ("held out, from those of the other settings", [error(row.held_out, row.ms) for row in rows]),
    ):
        known = [abs(value) for value in values if value is not None]
        if known:
            middle, worst = statistics.median(known), max(known)
            lines.append(
                f"{what}: {len(known)} steps, off by {middle:.1%} in the median, {worst:.1%} at most"
            )
    return lines + [describe(shares) for shares in shares_of(rows).values()]


def describe(shares: Shares) -> str:
    arithmetic = "" if shares.flops is None else f", {shares.flops / 1e9:,.0f} Gflop/s in batches"
    read = f"weights {shares.weights:.2f}, K and V {shares.kv:.2f} of the bandwidth"
    return f"{read}{arithmetic} ({shares.source})"
