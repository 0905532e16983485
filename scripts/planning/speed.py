"""How long a decode step takes: reading the weights, or the arithmetic with them, and reading K and V."""

from __future__ import annotations

from dataclasses import dataclass

from inertiakv.scripts.benchmarking import traffic

from .devices import Device, Link
from .memory import Footprint


@dataclass(frozen=True)
class Shares:
    """Shares of the bandwidth that weights, and K and V, are read with."""

    weights: float
    kv: float
    flops: float | None
    """Operations a second, where a batch was measured that is bound by them."""
    source: str


@dataclass(frozen=True)
class Machine:
    """One device for each rank."""

    device: Device
    shares: Shares
    link: Link | None = None
    """None: all-reduces take no time."""


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


def decode_step(footprint: Footprint, rows: int, machine: Machine) -> Step:
    """A step of so many rows, on all ranks at once.

    K and V are read slot by slot, taken or not; on a GPU a step that scores reads K once more.
    """
    shard, refreshes, device = footprint.shard, footprint.refresh_share, machine.device
    kept = rows * traffic.row_bytes(shard.model, footprint.kept)
    limit = (traffic.weight_bytes(shard.model, rows) + kept) / device.bandwidth
    read, arithmetic = _weights(footprint, rows, machine)
    kv = rows * footprint.decode_kv / (device.bandwidth * machine.shares.kv)
    parts = {"weights": read} if read >= arithmetic else {"arithmetic": arithmetic}
    parts["K and V"] = kv * (1 + refreshes / 2) if device.kind == "cuda" else kv
    if machine.link is not None and shard.ranks > 1:
        scores = machine.link.all_reduce(rows * footprint.slots * 4, shard.ranks)
        parts["all-reduce"] = _hidden_states(footprint, rows, machine.link) + refreshes * scores
    return Step(limit, parts)


def rehearsal(footprint: Footprint, rows: int, machine: Machine) -> float:
    """Seconds that a rule's drafts take, once an answer: for each draft its decode steps after the first
    token, and a pass of its queries over K and V of the prompt."""
    shard, queries = footprint.shard, rows * footprint.draft
    if not queries or not footprint.prompt_cache:
        return 0.0
    decoding = (footprint.draft - 1) * decode_step(footprint, rows, machine).seconds
    scoring = max(_weights(footprint, queries, machine))
    scoring += rows * footprint.prompt_cache / (machine.device.bandwidth * machine.shares.kv)
    if machine.link is not None and shard.ranks > 1:
        scores = machine.link.all_reduce(queries * (footprint.context + footprint.draft) * 4, shard.ranks)
        scoring += _hidden_states(footprint, queries, machine.link) + shard.config.num_layers * scores
    return footprint.drafts * (decoding + scoring)


def _weights(footprint: Footprint, tokens: int, machine: Machine) -> tuple[float, float]:
    """Seconds of reading the weights that so many tokens need, and of the arithmetic with them."""
    shard, device, shares = footprint.shard, machine.device, machine.shares
    read = traffic.weight_bytes(shard.model, tokens) / (device.bandwidth * shares.weights)
    rate = device.flops.get(shard.model.dtype.itemsize) or (shares.flops if device.kind == "cpu" else None)
    return read, 0.0 if rate is None else 2 * shard.active_weights * tokens / rate


def _hidden_states(footprint: Footprint, tokens: int, link: Link) -> float:
    """Seconds of the all-reduces of so many tokens' hidden states: two a layer, and one more."""
    shard = footprint.shard
    size = tokens * shard.config.hidden_size * shard.model.dtype.itemsize
    return (2 * shard.config.num_layers + 1) * link.all_reduce(size, shard.ranks)
