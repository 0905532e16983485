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

from .memory import make_shard
from .speed import Kind, Shares

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
CLEARLY = 1.1
"""A batch is bound by arithmetic where it takes so much longer than reading the weights does."""


@dataclass(frozen=True)
class Measured:
    """A measured decode step, in seconds, and what reading would take at the machine's full bandwidth."""

    file: str
    name: str
    dtype: str
    context: int
    batch: int
    kind: Kind
    weights_in: str
    """The dtype of the weights, or their quantisation."""
    seconds: float
    weights: float
    kv: float
    flops: float
    """Operations with the weights."""
    predicted: float | None = None
    """Seconds, by the shares that all measurements give; None where they give none."""
    held_out: float | None = None
    """The same, by the measurements of the other settings alone."""

    @property
    def setting(self) -> tuple[str, str, int, int]:
        return self.file, self.dtype, self.context, self.batch

    @property
    def group(self) -> tuple[Kind, str]:
        """Measurements of one group are described by the same shares."""
        return self.kind, self.weights_in

    def error(self, predicted: float | None) -> float | None:
        """Of a prediction in seconds, relative to the measurement."""
        return None if predicted is None else predicted / self.seconds - 1

    def by(self, shares: Shares | None) -> float | None:
        """Seconds by these shares; None for a batch where they do not say how fast arithmetic is."""
        if shares is None or (self.batch > 1 and shares.flops is None):
            return None
        arithmetic = 0.0 if shares.flops is None else self.flops / shares.flops
        return max(self.weights / shares.weights, arithmetic) + self.kv / shares.kv


def measured(files: Sequence[Path]) -> list[Measured]:
    """The policies in results files whose model is a known shape. Other implementations are left out."""
    return [row for file in files for row in _read(file)]


def _read(file: Path) -> list[Measured]:
    try:
        return list(_measured(results.read(file), file.name))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{file} is no results file of bench.py: {type(error).__name__}: {error}") from error


def _measured(result: dict[str, Any], file: str) -> Iterator[Measured]:
    about = result.get("model", {})
    if about.get("name") not in SHAPES:
        return
    kind: Kind = "cuda" if result["machine"]["device"].startswith("cuda") else "cpu"
    config = parse_config(shape(about["name"], about["layers"]))
    for dtype in dict.fromkeys(contender["dtype"] for contender in result["contenders"]):
        shard = make_shard(config, parse_dtype(dtype), about["quantize"], 1)
        for contender in result["contenders"]:
            if contender["dtype"] != dtype or not _is_ours(contender, kind):
                continue
            bandwidth, batch = 1e9 * contender["read_gb_per_s"], contender["batch"]
            yield Measured(
                *(file, contender["name"], dtype, contender["context"], batch),
                *(kind, about["quantize"] or dtype),
                seconds=contender["ms_per_step"]["median"] / 1000,
                weights=traffic.weight_bytes(shard.model, batch) / bandwidth,
                kv=contender["cache_bytes"] / bandwidth,
                flops=2 * shard.active_weights * batch,
            )


def _is_ours(contender: dict[str, Any], kind: Kind) -> bool:
    """Whether it is a policy, compiled, with the attention backend that is the default."""
    if not contender.get("graphs", {}).get("compiled") or "merged_from" in contender:
        return False
    usual = choose_backend("auto", torch.device(kind), parse_dtype(contender["dtype"]), compiled=True)
    return contender["attention"] == usual


def fit(rows: Sequence[Measured], source: str) -> Shares | None:
    """The shares with the least squares of relative errors; None where weights and K and V cannot be told
    apart. Single rows give the shares; batches, what their arithmetic takes beyond reading."""
    single = [row for row in rows if row.batch == 1]
    columns = torch.tensor([[r.weights / r.seconds, r.kv / r.seconds] for r in single], dtype=torch.float64)
    if len(single) < 2 or torch.linalg.matrix_rank(columns, rtol=0.01) < 2:
        return None
    slopes = torch.linalg.lstsq(columns, torch.ones(len(single), 1, dtype=torch.float64)).solution
    weights, kv = slopes[:, 0].tolist()
    if weights <= 0 or kv <= 0:
        return None
    rest = [(row, row.seconds - kv * row.kv) for row in rows if row.batch > 1]
    rates = [row.flops / seconds for row, seconds in rest if seconds > CLEARLY * weights * row.weights]
    return Shares(1 / weights, 1 / kv, statistics.median(rates) if rates else None, source)


def shares_of(rows: Sequence[Measured]) -> dict[tuple[Kind, str], Shares]:
    """By kind of device and what the weights are in, where enough was measured."""
    found = {}
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        source = f"from {len(members)} steps measured on {group[0]} in {group[1]}"
        if shares := fit(members, source):
            found[group] = shares
    return found


def shares_for(kind: Kind, weights_in: str) -> Shares:
    """From the committed measurements: of this kind of device and such weights, or else the nearest."""
    found = shares_of(measured(sorted(FOLDER.glob("*.json"))))
    if not found:
        raise ValueError(f"no results in {FOLDER} say how fast things are read: give --share")
    return found[max(found, key=lambda g: (g[0] == kind, g[1] == weights_in, g[1] == "bfloat16"))]


def predict(rows: Sequence[Measured]) -> list[Measured]:
    """The rows, with what is predicted of each."""
    everything, done = shares_of(rows), []
    for row in rows:
        others = shares_of([other for other in rows if other.setting != row.setting])
        predicted, held_out = (row.by(shares.get(row.group)) for shares in (everything, others))
        done.append(replace(row, predicted=predicted, held_out=held_out))
    return done


def table(rows: Sequence[Measured]) -> list[list[str]]:
    """Head and lines: what was measured, what is predicted, and by how much that is off."""
    lines = [
        ["policy", "file", "dtype", "context", "batch", "ms measured", "ms predicted", "error", "held out"]
    ]
    for row in rows:
        predicted = "-" if row.predicted is None else f"{1000 * row.predicted:.2f}"
        errors = [row.error(row.predicted), row.error(row.held_out)]
        where = [row.name, row.file, row.dtype, f"{row.context:,}", str(row.batch)]
        shown = ["-" if error is None else f"{error:+z.1%}" for error in errors]
        lines.append([*where, f"{1000 * row.seconds:.2f}", predicted, *shown])
    return lines


def summary(rows: Sequence[Measured]) -> list[str]:
    """Sentences on how far off predictions are, and on the shares that they come from."""
    lines = []
    for what, errors in (
        ("from the shares of all settings", [row.error(row.predicted) for row in rows]),
        ("held out, from those of the other settings", [row.error(row.held_out) for row in rows]),
    ):
        if known := [abs(error) for error in errors if error is not None]:
            middle, worst = statistics.median(known), max(known)
            lines.append(
                f"{what}: {len(known)} steps, off by {middle:.1%} in the median, {worst:.1%} at most"
            )
    for shares in shares_of(rows).values():
        arithmetic = "" if shares.flops is None else f", {shares.flops / 1e9:,.0f} Gflop/s in batches"
        read = f"weights {shares.weights:.2f}, K and V {shares.kv:.2f} of the bandwidth"
        lines.append(f"{read}{arithmetic} ({shares.source})")
    return lines
