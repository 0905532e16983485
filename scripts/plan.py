"""Plan for a model on a device: what fits, and how fast it decodes, with eviction and without.

Memory is counted as the decoder allocates it: weights, the cache that a prompt is read into, the cache that
it is decoded in, and the workspace of reading. A decode step takes the time of reading the weights, or of the
arithmetic with them, and of reading K and V, with the shares of the bandwidth that benchmarks/*.json show.

Examples:
  python scripts/plan.py                                  SmolLM2-135M on this machine, which is measured
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv import policy
from inertiakv.compiling.collectives import TensorParallel
from inertiakv.decoding.tensor_parallel import check_rule
from inertiakv.evals.reporting import figures
from inertiakv.models import ModelConfig, parallel, parse_config
from inertiakv.models.checkpoint import read_config as read_model_config
from inertiakv.models.config import parse_dtype
from inertiakv.models.hub import find_config
from inertiakv.requests.prompts import check_positions
from inertiakv.scripts.benchmarking.shapes import SHAPES
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Count, Counts, Option, Switch, parse
from inertiakv.scripts.planning import check, devices, report
from inertiakv.scripts.planning.devices import Link
from inertiakv.scripts.planning.plans import FULL, Plan
from inertiakv.scripts.planning.speed import Machine, Shares

ALL_REDUCE_LATENCY = 10e-6
"""Seconds that an all-reduce takes however small it is."""
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
    asked = {name: getattr(args, name) for name in ("quantize", "usable", "policy", "ranks", "new_tokens")}
    plan = Plan(args.model, config, dtype, machine, rule, args.context, args.batch, **asked)
    return {**plan.as_json(), "command": args.command}


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
    device = devices.choose(args.device, args.memory_gb, args.bandwidth_gb_per_s, args.tflops)
    if args.share is not None:
        return Machine(device, Shares(args.share, args.share, None, "given"), link)
    return Machine(device, check.shares_for(device.kind, weights_in), link)


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
