"""Plan for a model on a device: what fits, and how fast it decodes, with eviction and without.

Memory is counted as the decoder allocates it: weights, the cache that a prompt is read into, the cache that
it is decoded in, and the workspace of reading. A decode step takes the time of reading the weights, or of the
arithmetic with them, and of reading K and V, with the shares of the bandwidth that benchmarks/*.json show.
First it says whether the most that is asked for fits, and if not, how much is missing and what would fit.

Examples:
  python scripts/plan.py                                  SmolLM2-135M on this machine, which is measured
  python scripts/plan.py --model llama-3.1-8b --device rtx-4090 --context 64000    no, but this would fit: ...
  python scripts/plan.py --model llama-3.1-8b --device h100 --context 65536 --batch 1,8,16
  python scripts/plan.py --model FOLDER --device rtx-4090 --quantize int8 --policy snapkv --compression 0.8
  python scripts/plan.py --model llama-3.3-70b --device h200 --ranks 2,4 --plot plan.png --out plan.md
  python scripts/plan.py --model qwen2.5-14b --memory-gb 48 --bandwidth-gb-per-s 864 --tflops 181 --json

Tables go to stdout, or with --json one object. The exit code is 0, or 2 where something cannot be.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv import EvictionConfig, policy
from inertiakv.compiling.collectives import TensorParallel
from inertiakv.decoding.tensor_parallel import check_rule
from inertiakv.evals.reporting import figures
from inertiakv.models import ModelConfig, parallel, parse_config
from inertiakv.models.checkpoint import read_config as read_model_config
from inertiakv.models.config import parse_dtype
from inertiakv.models.hub import find_config
from inertiakv.requests.prompts import check_positions
from inertiakv.scripts.benchmarking import traffic
from inertiakv.scripts.benchmarking.shapes import SHAPES
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Count, Counts, Option, Switch, parse
from inertiakv.scripts.planning import check, fitting, report
from inertiakv.scripts.planning.memory import Footprint, Shard, make_footprint, make_shard
from inertiakv.scripts.planning.report import FULL
from inertiakv.scripts.planning.speed import (
    THIS,
    Link,
    Machine,
    Shares,
    choose_device,
    decode_step,
    rehearsal,
)

ALL_REDUCE_LATENCY = 10e-6
"""Seconds that an all-reduce takes however small it is."""
COMPRESSIONS = (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99)
MOST = dict.fromkeys(("memory_gb", "bandwidth_gb_per_s", "tflops", "interconnect_gb_per_s"), 1e15)
MOST |= {"usable": 1, "share": 1}
"""The largest value of options that must be above 0."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and as what numbers."""

    model: str = "smollm2-135m"
    """A well-known shape (an unknown name lists them), a folder with a config.json, or a name on the hub."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of activations and KV cache, and of weights that are not quantised; auto: as the config says."""
    quantize: Literal["int8"] | None = None
    """Weights of linear layers in one byte."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """On what it runs."""

    device: Annotated[str | None, Option(default="this")] = None
    """h200, h100, a100, rtx-4090, or this machine: its free memory, and its bandwidth as measured now."""
    memory_gb: float | None = None
    """Instead, with a bandwidth: the memory of a device of yours."""
    bandwidth_gb_per_s: float | None = None
    """How fast it reads its memory."""
    tflops: float | None = None
    """Its arithmetic; left out, arithmetic is taken to be no bottleneck."""
    usable: float = 0.9
    """Share of the memory that may be filled; the rest is for the driver, graphs, and fragments."""
    ranks: Counts = field(default_factory=lambda: [1])
    """Devices that a model is split over: heads, MLPs and the vocabulary head, evenly."""
    interconnect_gb_per_s: float | None = None
    """Between ranks, for two all-reduces a layer and one more. Left out, they take no time."""
    share: float | None = None
    """Share of the bandwidth that weights, K and V are read with, instead of those that were measured."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What is asked of it."""

    context: Counts = field(default_factory=lambda: [8000])
    """Tokens of each prompt."""
    new_tokens: Count = 128
    """Tokens of each answer; a step's cost is that of the one in the middle."""
    batch: Counts = field(default_factory=lambda: [1])
    """Rows that are decoded together."""
    policy: str = "inertiakv"
    """A named policy, set against the full cache; full: that alone."""
    compression: Annotated[float | None, Option(default="0.9")] = None
    """Share of the prompt to evict."""
    budget: int | None = None
    """Instead: tokens to keep."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What becomes of it."""

    json: Switch = False
    """Print one JSON object instead of tables."""
    out: Path | None = None
    """Also write the tables as a Markdown page."""
    plot: Path | None = None
    """Also draw token/s and sessions against compression (needs the extra `plot`)."""


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, DeviceOptions, RequestOptions, OutputOptions):
    command: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: run(parse(Arguments, argv, __doc__, "plan.py")))


def run(args: Arguments) -> None:
    for option, file in (("out", args.out), ("plot", args.plot)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ValueError(f"--{option} {file} is no file in a folder that is there")
    if args.plot is not None and args.policy == FULL:
        raise ValueError("--plot draws what compression does, and policy 'full' evicts nothing")
    if args.plot is not None and not figures.available():
        raise ValueError(figures.MISSING)
    plan = make(args)
    if args.plot is not None:
        report.draw_chart(args.plot, plan)
    if args.out is not None:
        picture = None if args.plot is None else os.path.relpath(args.plot, args.out.parent)
        args.out.write_text(report.page(plan, picture), encoding="utf-8")
    print(json.dumps(plan) if args.json else report.text(plan))


def make(args: Arguments) -> dict[str, Any]:
    """The plan as a JSON object. Raises ValueError where the arguments make no sense."""
    config = read_config(args.model)
    dtype = config.stored_dtype if args.dtype == "auto" else parse_dtype(args.dtype)
    dtype = dtype or torch.bfloat16
    changes = {"compression": args.compression, "budget": args.budget}
    rule = policy(args.policy, **{name: value for name, value in changes.items() if value is not None})
    draft = rule.draft + 1 if rule is not None and rule.draft else 0
    check_positions(args.context, args.new_tokens, config.max_positions, draft)
    for count in args.ranks:
        check_rule(rule, parallel.share(config, TensorParallel(size=count))[1])
    machine = make_machine(args, args.quantize or str(dtype).removeprefix("torch."))
    return Plan(args, config, dtype, machine, rule).as_json()


@dataclass(frozen=True)
class Plan:
    """Every number of ranks with every context and batch, with a policy and the full cache."""

    args: Arguments
    config: ModelConfig
    dtype: torch.dtype
    machine: Machine
    rule: EvictionConfig | None

    @property
    def available(self) -> float:
        return self.args.usable * self.machine.device.memory

    def as_json(self) -> dict[str, Any]:
        """Raises ValueError for what cannot be split, or evicted to its budget."""
        args, device = self.args, self.machine.device
        shards = {
            ranks: make_shard(self.config, self.dtype, args.quantize, ranks) for ranks in {1, *args.ranks}
        }
        rules = {FULL: None, args.policy: self.rule}
        footprints = {
            (ranks, context, name): make_footprint(
                shards[ranks], context, args.new_tokens, rules[name], on_cpu=self.machine.device.kind == "cpu"
            )
            for ranks, context, name in product(args.ranks, args.context, rules)
        }
        return {
            "model": {
                "name": args.model,
                "dtype": str(self.dtype).removeprefix("torch."),
                "quantize": args.quantize,
                "parameters": shards[1].parameters,
                "weight_bytes": shards[1].weight_bytes,
                "kv_bytes_per_token": traffic.kv_bytes(self.config, [1], self.dtype),
            },
            "device": {
                "name": device.name,
                "memory_bytes": round(device.memory),
                "usable": args.usable,
                "bytes_per_second": round(device.bandwidth),
                "flops_per_second": device.flops.get(self.dtype.itemsize),
                "interconnect_bytes_per_second": self.machine.link and self.machine.link.bandwidth,
            },
            "shares": vars(self.machine.shares),
            "fitting": [self._fitting(name, rules[name]) for name in reversed(rules)],
            "rooms": [self._setting(*key) | self._memory(fp) for key, fp in footprints.items()],
            "steps": [
                self._setting(ranks, context, name) | self._step(footprints[ranks, context, name], batch)
                for ranks, context, batch, name in product(args.ranks, args.context, args.batch, rules)
            ],
            "sweep": [
                self._setting(ranks, context, args.policy) | point
                for ranks, context in product(args.ranks, args.context)
                for point in self._sweep(shards[ranks], context)
            ],
            "notes": self.notes(),
            "command": args.command,
        }

    def _setting(self, ranks: int, context: int, name: str) -> dict[str, Any]:
        return {"ranks": ranks, "context": context, "new_tokens": self.args.new_tokens, "policy": name}

    def _memory(self, footprint: Footprint) -> dict[str, Any]:
        """What a row takes on each rank, and how many fit."""
        return {
            "kept_tokens": footprint.kept,
            "slots": footprint.slots,
            "weight_bytes": footprint.weights,
            "bytes_a_row": {
                "prompt_cache": footprint.prompt_cache,
                "decode_cache": footprint.decode_cache,
                "workspace": footprint.workspace,
            },
            "largest_batch": footprint.most_together(self.available),
            "sessions": footprint.most_one_by_one(self.available),
        }

    def _fitting(self, name: str, rule: EvictionConfig | None) -> dict[str, Any]:
        """Of the most that was asked for: the longest context, the largest batch, on the most ranks."""
        args, (ranks, context, batch) = (
            self.args,
            map(max, (self.args.ranks, self.args.context, self.args.batch)),
        )
        on_cpu = self.machine.device.kind == "cpu"
        asked = fitting.Request(
            self.config, self.dtype, args.quantize, ranks, context, args.new_tokens, batch, rule, on_cpu
        )
        return self._setting(ranks, context, name) | fitting.describe(asked, self.available)

    def _step(self, footprint: Footprint, batch: int) -> dict[str, Any]:
        """What so many rows take on each rank, and how fast they are decoded by all."""
        step = decode_step(footprint, batch, self.machine)
        sizes = {"together": footprint.together(batch), "one by one": footprint.one_by_one(batch)}
        fits = next((how for how, size in sizes.items() if size <= self.available), "no")
        rehearsed_rows = 1 if fits == "one by one" else batch
        return {
            "batch": batch,
            "bytes_read_together": sizes["together"],
            "bytes_read_one_by_one": sizes["one by one"],
            "fits": fits,
            "limit_ms": 1000 * step.limit,
            "ms": 1000 * step.seconds,
            "parts_ms": {part: 1000 * seconds for part, seconds in step.parts.items()},
            "bottleneck": step.bottleneck,
            "tokens_per_second": batch / step.seconds,
            "rehearsal_ms": 1000 * rehearsal(footprint, rehearsed_rows, self.machine),
        }

    def _sweep(self, shard: Shard, context: int) -> Iterator[dict[str, Any]]:
        """The policy at one compression after the other: how many sessions fit, and how fast they are."""
        if self.rule is None:
            return
        for compression in COMPRESSIONS:
            try:
                eviction = policy(self.args.policy, compression=compression)
                footprint = make_footprint(
                    shard,
                    context,
                    self.args.new_tokens,
                    eviction,
                    on_cpu=self.machine.device.kind == "cpu",
                )
            except ValueError:  # less is kept than the rule protects
                continue
            sessions = footprint.most_one_by_one(self.available)
            speeds = [n / decode_step(footprint, n, self.machine).seconds for n in (1, max(1, sessions))]
            yield {
                "compression": compression,
                "largest_batch": footprint.most_together(self.available),
                "sessions": sessions,
                "tokens_per_second_of_one": speeds[0],
                "tokens_per_second_of_all": speeds[1] if sessions else 0.0,
            }

    def notes(self) -> list[str]:
        """What a reader should know of where the numbers come from."""
        device, source, rule = self.machine.device, self.machine.shares.source, self.rule
        ranks, kv_heads = max(self.args.ranks), self.config.num_kv_heads
        said = []
        if source != "given" and f"on {device.kind} " not in source:
            said.append(
                f"nothing was measured on {device.kind} yet: the shares are those of another kind of device"
            )
        if device.kind == "cuda" and device.name != THIS:
            said.append("a bandwidth from a data sheet is more than programs read with")
        if ranks > 1 and self.machine.link is None:
            said.append("all-reduces take no time here: see --interconnect-gb-per-s")
        if ranks > kv_heads:
            said.append(f"{kv_heads} KV heads are fewer than ranks: each is on several")
        if rule is None:
            return said
        for context in self.args.context:
            if rule.budget is not None and rule.budget >= context:
                said.append(f"a budget of {rule.budget:,} tokens evicts nothing of a context of {context:,}")
        if rule.draft and (rule.budget or 0) < max(self.args.context):
            said.append("rehearsal ms: all drafts, once an answer; of all rows or, one by one, of each")
        if rule.allocation in ("adaptive", "model"):
            said.append(
                "buffers are at least as large as said: the fullest set decides, which a prompt tells"
            )
        return said


def make_machine(args: DeviceOptions, weights_in: str) -> Machine:
    """The device, and the shares of its bandwidth that are given or were measured with such weights."""
    for name, most in MOST.items():
        value = getattr(args, name)
        if value is not None and not 0 < value <= most:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be above 0 and at most {most:g}, got {value:g}")
    link = None
    if args.interconnect_gb_per_s is not None:
        if max(args.ranks) == 1:
            raise ValueError("--interconnect-gb-per-s has no effect with one rank")
        link = Link(1e9 * args.interconnect_gb_per_s, ALL_REDUCE_LATENCY)
    device = choose_device(args.device, args.memory_gb, args.bandwidth_gb_per_s, args.tflops)
    if args.share is not None:
        return Machine(device, Shares(args.share, args.share, None, "given"), link)
    shares = check.shares_for(device.kind, weights_in)
    if f"on {device.kind} " not in shares.source:  # another kind of device says nothing of arithmetic here
        shares = replace(shares, flops=None)
    return Machine(device, shares, link)


def read_config(name: str) -> ModelConfig:
    """The config of a well-known shape, of a folder, or of a hub name."""
    if name in SHAPES:
        return parse_config(SHAPES[name])
    if "/" not in name and not Path(name).is_dir():
        shapes = ", ".join(SHAPES)
        raise ValueError(f"no model {name!r}: no such folder, no hub name (owner/name), none of {shapes}")
    file = find_config(name)
    return read_model_config(file.parent)


if __name__ == "__main__":
    sys.exit(main())
