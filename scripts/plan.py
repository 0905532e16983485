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
  python scripts/plan.py --check benchmarks/smollm2-135m-cpu.json   predictions against measurements

Tables go to stdout, or with --json one object. The exit code is 0, or 2 where something cannot be.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv import EvictionConfig, policy
from inertiakv.compiling.collectives import TensorParallel
from inertiakv.decoding.tensor_parallel import check_rule
from inertiakv.evals.reporting import figures
from inertiakv.evals.reporting.table import aligned
from inertiakv.models import ModelConfig, parallel, parse_config
from inertiakv.models.config import parse_dtype
from inertiakv.models.hub import find_config
from inertiakv.requests.prompts import check_positions
from inertiakv.scripts.benchmarking.shapes import SHAPES
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Option, Switch, numbers, parse
from inertiakv.scripts.planning import chart, check, devices, tables
from inertiakv.scripts.planning.plans import FULL, Plan
from inertiakv.scripts.planning.speed import Link, Shares

ALL_REDUCE_US = 10.0

Numbers = Annotated[str, Option(metavar="N,...")]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and as what numbers."""

    model: str = "smollm2-135m"
    """A well-known shape (an unknown name lists them), a folder with a config.json, or a name on the hub."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of activations and KV cache, and of weights that are not quantised; auto: as the config says."""
    quantize: Literal["int8"] | None = None
    """Weights of linear layers in one byte."""


@dataclass(frozen=True)
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
    ranks: Numbers = "1"
    """Devices that a model is split over: heads, MLPs and the vocabulary head, evenly."""
    interconnect_gb_per_s: float | None = None
    """Between ranks: an all-reduce moves 2 (R - 1) / R of its bytes. Left out, it takes no time."""
    all_reduce_us: Annotated[float | None, Option(default="10")] = None
    """What an all-reduce takes however small it is, in microseconds; there are two a layer, and one more."""
    share: float | None = None
    """Share of the bandwidth that weights, K and V are read with, instead of those that were measured."""


@dataclass(frozen=True)
class RequestOptions:
    """What is asked of it."""

    context: Numbers = "8000"
    """Tokens of each prompt."""
    new_tokens: int = 128
    """Tokens of each answer; a step's cost is that of the one in the middle."""
    batch: Numbers = "1"
    """Rows that are decoded together."""
    policy: str = "inertiakv"
    """A named policy, set against the full cache; full: that alone."""
    compression: Annotated[float | None, Option(default="0.9")] = None
    """Share of the prompt to evict."""
    budget: int | None = None
    """Instead: tokens to keep."""
    prefill_chunk: int = 2048
    """Tokens of a prompt that are read at a time."""


@dataclass(frozen=True)
class OutputOptions:
    """What becomes of it."""

    json: Switch = False
    """Print one JSON object instead of tables."""
    out: Path | None = None
    """Also write the tables as a Markdown page."""
    plot: Path | None = None
    """Also draw token/s and sessions against compression (needs the extra `plot`)."""
    check: tuple[Path, ...] = ()
    """Plan nothing: set predictions against the steps in results files of scripts/bench.py."""


@dataclass(frozen=True)
class Arguments:
    model: ModelOptions
    device: DeviceOptions
    request: RequestOptions
    output: OutputOptions


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "scripts/plan.py", *argv])
    return program.run(lambda: run(parse(Arguments, argv, __doc__), command))


def run(args: Arguments, command: str) -> None:
    if args.output.check:
        compare(args)
        return
    output = args.output
    check_output(output, args.request.policy)
    plan = make(args)
    found = {**plan.as_json(), "notes": notes(plan), "command": command}
    if output.plot is not None:
        chart.paint_plan(output.plot, found)
    if output.out is not None:
        picture = output.plot and os.path.relpath(output.plot, output.out.parent)
        output.out.write_text(tables.page(found, picture), encoding="utf-8")
    print(json.dumps(found) if output.json else tables.text(found))


def check_output(output: OutputOptions, policy_name: str) -> None:
    """Raise ValueError or OSError for what cannot be written."""
    for option, file in (("out", output.out), ("plot", output.plot)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ValueError(f"--{option} {file} is no file in a folder that is there")
    if output.plot is not None and policy_name == FULL:
        raise ValueError("--plot draws what compression does, and policy 'full' evicts nothing")
    if output.plot is not None and not figures.available():
        raise ValueError(figures.MISSING)


def make(args: Arguments) -> Plan:
    """All that the arguments say. Raises ValueError where they make no sense."""
    given, request = args.device, args.request
    name, config = args.model.model, read_config(args.model.model)
    dtype = parse_dtype(args.model.dtype) if args.model.dtype != "auto" else config.stored_dtype
    dtype = dtype or torch.bfloat16
    ranks, contexts, batches = (
        whole_numbers(option, text)
        for option, text in (("ranks", given.ranks), ("context", request.context), ("batch", request.batch))
    )
    for option, number in (("new-tokens", request.new_tokens), ("prefill-chunk", request.prefill_chunk)):
        devices.check_positive(option, number)
    rule = chosen_rule(request)
    fed = rule.draft + 1 if rule is not None and rule.draft else 0
    check_positions(contexts, request.new_tokens, config.max_positions, fed)
    for option, share in (("usable", given.usable), ("share", given.share)):
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"--{option} must be above 0 and at most 1, got {share:g}")
    if args.model.quantize is not None and config.moe is not None:
        raise ValueError("--quantize: the experts of a mixture are not quantised")
    for count in ranks:
        check_rule(rule, parallel.share(config, TensorParallel(size=count))[1])
    rules = {FULL: None, request.policy: rule}
    link = make_link(given, ranks)
    device = devices.choose(given.device, given.memory_gb, given.bandwidth_gb_per_s, given.tflops)
    shares = choose_shares(given.share, device.kind, args.model.quantize or str(dtype).removeprefix("torch."))
    return Plan(
        name=name,
        config=config,
        dtype=dtype,
        quantize=args.model.quantize,
        device=device,
        shares=shares,
        link=link,
        usable=given.usable,
        rules=rules,
        ranks=ranks,
        contexts=contexts,
        batches=batches,
        new_tokens=request.new_tokens,
        chunk=request.prefill_chunk,
    )


def read_config(name: str) -> ModelConfig:
    """Of a shape, a folder or a hub name."""
    if name in SHAPES:
        return parse_config(SHAPES[name])
    if "/" not in name and not Path(name).is_dir():
        raise ValueError(
            f"no model {name!r}: no such folder, no hub name (owner/name), no shape; "
            f"shapes: {', '.join(SHAPES)}"
        )
    file = find_config(name)
    try:
        return parse_config(json.loads(file.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def whole_numbers(option: str, text: str) -> list[int]:
    found = numbers(option, text, int)
    for number in found:
        devices.check_positive(option, number)
    return found


def chosen_rule(request: RequestOptions) -> EvictionConfig | None:
    changes = {"compression": request.compression, "budget": request.budget}
    return policy(request.policy, **{key: value for key, value in changes.items() if value is not None})


def make_link(given: DeviceOptions, ranks: Sequence[int]) -> Link | None:
    microseconds = given.all_reduce_us
    if given.interconnect_gb_per_s is None:
        if microseconds is not None:
            raise ValueError("--all-reduce-us has no effect without --interconnect-gb-per-s")
        return None
    devices.check_positive("interconnect-gb-per-s", given.interconnect_gb_per_s)
    if max(ranks) == 1:
        raise ValueError("--interconnect-gb-per-s has no effect with one rank")
    microseconds = ALL_REDUCE_US if microseconds is None else microseconds
    if not 0 <= microseconds < math.inf:
        raise ValueError(f"--all-reduce-us must be at least 0, got {microseconds:g}")
    return Link(1e9 * given.interconnect_gb_per_s, 1e-6 * microseconds)


def choose_shares(share: float | None, kind: devices.Kind, weights_in: str) -> Shares:
    """Those given, or measured on this kind of device with such weights, or else those that come nearest."""
    if share is not None:
        return Shares(share, share, None, "given")
    found = check.shares_of(check.measured(sorted(check.FOLDER.glob("*.json"))))
    if not found:
        raise ValueError(f"no results in {check.FOLDER} say how fast things are read: give --share")
    nearest = max(found, key=lambda group: (group[0] == kind, group[1] == weights_in, group[1] == "bfloat16"))
    return found[nearest]


def notes(plan: Plan) -> list[str]:
    """What a reader should know of where the numbers come from."""
    said = []
    if plan.shares.source != "given" and f"on {plan.device.kind} " not in plan.shares.source:
        said.append(
            f"nothing was measured on {plan.device.kind} yet: the shares are those of another kind of device"
        )
    if plan.device.kind == "cuda" and plan.device.name != devices.THIS:
        said.append("a bandwidth from a data sheet is more than programs read with")
    if max(plan.ranks) > 1 and plan.link is None:
        said.append("all-reduces take no time here: see --interconnect-gb-per-s")
    if max(plan.ranks) > plan.config.num_kv_heads:
        said.append(f"{plan.config.num_kv_heads} KV heads are fewer than ranks: each is on several")
    for rule, context in itertools.product(plan.rules.values(), plan.contexts):
        if rule is not None and rule.budget is not None and rule.budget >= context:
            said.append(f"a budget of {rule.budget:,} tokens evicts nothing of a context of {context:,}")
    for rule in plan.rules.values():
        if rule is not None and rule.draft and (rule.budget or 0) < max(plan.contexts):
            said.append(
                f"rehearsal ms: {rule.drafts} drafts of {rule.draft} tokens before an answer's second token, "
                "decode steps and a pass over the prompt each, of all rows or, one by one, of each; "
                "no part of ms and token/s"
            )
    if any(rule is not None and rule.allocation in ("adaptive", "model") for rule in plan.rules.values()):
        said.append(
            "buffers are as large as the fullest set needs, which only a prompt tells: at least what is said"
        )
    return said


def compare(args: Arguments) -> None:
    """The table of predictions and measurements. Raises ValueError where nothing can be compared."""
    output = OutputOptions(check=args.output.check, json=args.output.json)
    if args != Arguments(ModelOptions(), DeviceOptions(), RequestOptions(), output):
        raise ValueError("--check plans nothing: --json alone goes with it")
    rows = check.predict(check.measured(args.output.check))
    if not rows:
        raise ValueError(f"{args.output.check[0]} has no policies of a known shape to compare with")
    if args.output.json:
        print(json.dumps([as_object(row) for row in rows]))
        return
    print("\n".join([*aligned(check.table(rows)), "", *check.summary(rows)]))


def as_object(row: check.Measured) -> dict[str, Any]:
    fields = {name: value for name, value in vars(row).items() if name != "sample"}
    return {**fields, "ms": row.ms, "error": check.error(row.predicted, row.ms)}


if __name__ == "__main__":
    sys.exit(main())
