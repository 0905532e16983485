"""How long a decode step takes: reading the weights, or the arithmetic with them, and reading K and V."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inertiakv.scripts.benchmarking import traffic

from .devices import Device, Kind
from .rank import Rank
from .room import Request, Room

CLEARLY = 1.1
"""By so much more time than reading takes, what it takes is arithmetic."""


@dataclass(frozen=True)
class Sample:
    """A step that was measured, and what reading would take at the machine's bandwidth, in seconds."""

    kind: Kind
    weights_in: str
    """The dtype of the weights, or their quantisation."""
    batch: int
    seconds: float
    weights: float
    kv: float
    flops: float


@dataclass(frozen=True)
class Shares:
    """Parts of the bandwidth that weights, and K and V, are read with."""

    weights: float
    kv: float
    flops: float | None
    """Operations a second, where a batch was measured that is bound by them."""
    source: str

    def seconds(self, sample: Sample) -> float:
        """What such a step takes, by these shares."""
        arithmetic = 0.0 if self.flops is None else sample.flops / self.flops
        return max(sample.weights / self.weights, arithmetic) + sample.kv / self.kv


@dataclass(frozen=True)
class Link:
    """Between ranks. Each all-reduce takes the latency, and moves 2 (R - 1) / R of its bytes over R ranks."""

    bandwidth: float
    latency: float

    def all_reduce(self, size: float, ranks: int) -> float:
        return self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth


@dataclass(frozen=True)
class Step:
    limit: float
    """Seconds that no implementation can do without: weights once, kept K and V once, at full bandwidth."""
    parts: dict[str, float]
    """Seconds, by what they are spent on."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def fit(samples: Sequence[Sample], source: str) -> Shares | None:
    """The shares that describe these steps best, by the least squares of relative deviations; None where
    they do not tell weights from K and V. Single rows say how fast things are read, batches how much time
    arithmetic takes beyond that."""
    single = [sample for sample in samples if sample.batch == 1]
    columns = torch.tensor([[s.weights / s.seconds, s.kv / s.seconds] for s in single], dtype=torch.float64)
    if len(single) < 2 or torch.linalg.matrix_rank(columns, rtol=0.01) < 2:
        return None
    slopes = torch.linalg.lstsq(columns, torch.ones(len(single), 1, dtype=torch.float64)).solution
    weights, kv = slopes[:, 0].tolist()
    if weights <= 0 or kv <= 0:
        return None
    left = [(s, s.seconds - kv * s.kv) for s in samples if s.batch > 1]
    rates = [s.flops / seconds for s, seconds in left if seconds > CLEARLY * weights * s.weights]
    return Shares(1 / weights, 1 / kv, statistics.median(rates) if rates else None, source)


def step(
    rank: Rank, room: Room, request: Request, rows: int, device: Device, shares: Shares, link: Link | None
) -> Step:
    """What a step of so many rows takes, on all ranks at once.

    K and V are read slot by slot, taken or not; on a GPU a step that scores reads K once more.
    """
    of_rows = rows * traffic.row_bytes(rank.model, room.kept)
    limit = (traffic.weight_bytes(rank.model, rows) + of_rows) / device.bandwidth
    read, arithmetic = _weights(rank, rows, device, shares)
    kv = rows * room.decode_kv / (device.bandwidth * shares.kv)
    scored = request.refresh_share
    parts = {"weights": read} if read >= arithmetic else {"arithmetic": arithmetic}
    parts["K and V"] = kv * (1 + scored / 2) if device.kind == "cuda" else kv
    if link is not None and rank.ranks > 1:
        scores = link.all_reduce(rows * room.slots * 4, rank.ranks)
        parts["all-reduce"] = _hidden(rank, rows, link) + scored * scores
    return Step(limit, parts)


def rehearsal(
    rank: Rank, room: Room, request: Request, rows: int, device: Device, shares: Shares, link: Link | None
) -> float:
    """Seconds that a rule's drafts take, once an answer: of each draft the decode steps behind its first
    token, and the pass of its queries, which read K and V of the prompt."""
    eviction, queries = request.eviction, rows * request.draft
    if eviction is None or not queries or not room.prompt:
        return 0.0
    decoding = (request.draft - 1) * step(rank, room, request, rows, device, shares, link).seconds
    scoring = max(_weights(rank, queries, device, shares))
    scoring += rows * room.prompt / (device.bandwidth * shares.kv)
    if link is not None and rank.ranks > 1:
        scores = link.all_reduce(queries * (request.context + request.draft) * 4, rank.ranks)
        scoring += _hidden(rank, queries, link) + rank.config.num_layers * scores
    return eviction.drafts * (decoding + scoring)


def _weights(rank: Rank, tokens: int, device: Device, shares: Shares) -> tuple[float, float]:
    """Seconds of reading the weights that so many tokens need, and of the arithmetic with them."""
    read = traffic.weight_bytes(rank.model, tokens) / (device.bandwidth * shares.weights)
    rate = device.flops.get(rank.model.dtype.itemsize) or (shares.flops if device.kind == "cpu" else None)
    return read, 0.0 if rate is None else 2 * rank.active * tokens / rate


def _hidden(rank: Rank, tokens: int, link: Link) -> float:
    """Seconds in which ranks add up the hidden states of so many tokens: twice a layer, and once more."""
    config = rank.config
    size = tokens * config.hidden_size * rank.model.dtype.itemsize
    return (2 * config.num_layers + 1) * link.all_reduce(size, rank.ranks)
