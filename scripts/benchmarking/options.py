"""The command line of `scripts/bench.py`, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch

from inertiakv import EvictionConfig, policy
from inertiakv.models.config import parse_dtype
from inertiakv.models.parallel import place
from inertiakv.models.quantize import QUANTIZED
from inertiakv.scripts.cli import arguments
from inertiakv.scripts.cli.arguments import Option, Switch

from .ours import refresh_period
from .rivals import EVICTING, check_rival
from .shapes import shape

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_RIVALS = ["transformers", "transformers-static"]


@dataclass(frozen=True)
class Options:
    command: str
    model: str | None
    shape: str | None
    layers: int | None
    contexts: list[int]
    batches: list[int]
    dtypes: list[str | torch.dtype]
    quantize: str | None
    device: torch.device
    policies: dict[str, EvictionConfig | None]
    against: list[str]
    reference: str
    """The contender that the times of the others are relative to."""
    kept: EvictionConfig
    """What rivals keep that evict."""
    attention: str
    compiled: bool
    merge: list[Path]
    steps: int
    blocks: int
    period: int
    """Steps after which the schedules of all contenders repeat together."""
    skip_prefill: bool
    compile_times: bool
    profile: bool
    read_gb_per_s: float | None
    json: bool
    out: Path | None

    @property
    def name(self) -> str:
        """The model's or the shape's."""
        return self.shape or self.model or DEFAULT_MODEL


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def _numbers(text: str) -> list[int]:
    return list(dict.fromkeys(_positive(part) for part in text.split(",")))


def _names(text: str) -> list[str]:
    return [] if text == "none" else list(dict.fromkeys(text.split(",")))


Count = Annotated[int | None, Option(metavar="N", parse=_positive)]
Counts = Annotated[list[int], Option(metavar="N,...", parse=_numbers)]


@dataclass(frozen=True)
class CaseOptions:
    """What is decoded."""

    model: Annotated[str | None, Option(default=DEFAULT_MODEL)] = None
    """A folder, or a name on the Hugging Face hub."""
    shape: Annotated[str | None, Option(metavar="NAME")] = None
    """Instead, with random weights: a well-known shape (an unknown name lists them)."""
    layers: Count = None
    """That shape with so many layers."""
    context: Counts = field(default_factory=lambda: [8000])
    """Tokens of the prompt, more than the model has positions for if need be."""
    batch: Counts = field(default_factory=lambda: [1])
    """Rows; those of a batch have from all to half of the context."""
    dtype: Annotated[
        list[str] | None, Option("D,...", "the checkpoint's; for shapes bfloat16", parse=_names)
    ] = None
    """bfloat16, float32, ..."""
    quantize: Annotated[str | None, Option(choices=QUANTIZED)] = None
    """Of the weights of linear layers."""
    device: Annotated[str | None, Option(default="cuda, or else cpu")] = None
    """cpu, cuda, cuda:1, ..."""


@dataclass(frozen=True)
class ContenderOptions:
    """Who decodes it."""

    policies: Annotated[list[str], Option("NAME,...|none", parse=_names)] = field(
        default_factory=lambda: ["full", "inertiakv", "lazy4", "score_free"]
    )
    """Policies of inertiakv."""
    compression: Annotated[float | None, Option(default="0.9")] = None
    """Share of the prompt to evict."""
    budget: Count = None
    """Instead: tokens that each row keeps."""
    against: Annotated[
        list[str] | None,
        Option("NAME,...|none", f"{','.join(DEFAULT_RIVALS)}; with torchrun none", parse=_names),
    ] = None
    """Other implementations: transformers, transformers-static, kvpress and kvpress4. The last two need an
    environment of their own: ask for them to see which."""
    attention: Literal["auto", "dense", "flex"] = "auto"
    """Of the policies; auto: the faster one."""
    compile: bool = True
    """Decode with compiled graphs."""
    merge: Annotated[tuple[Path, ...], Option(repeat=True)] = ()
    """Add the contenders of another results file. May be given several times."""


@dataclass(frozen=True)
class MeasureOptions:
    """How it is measured."""

    steps: Annotated[int | None, Option("N", "16, on a GPU 64", parse=_positive)] = None
    """Decode steps of a block."""
    blocks: Annotated[int, Option("N", parse=_positive)] = 12
    """Blocks of each contender."""
    skip_prefill: Switch = False
    """Fill the prompt's cache with random K and V."""
    compile_times: Switch = False
    """Also compile in new processes, cold and warm."""
    profile: Switch = False
    """Also say where a step's time goes: compiles it several times anew, which takes minutes."""
    read_gb_per_s: Annotated[float | None, Option("X", parse=_rate)] = None
    """Take this bandwidth, do not measure it."""


@dataclass(frozen=True)
class OutputOptions:
    """Where the results go."""

    json: Switch = False
    """Print one JSON object instead of tables."""
    out: Path | None = None
    """Write the JSON object to a file, and a profile's chart beside it."""


@dataclass(frozen=True)
class Arguments:
    case: CaseOptions
    contenders: ContenderOptions
    measure: MeasureOptions
    output: OutputOptions


def parse(argv: Sequence[str], description: str | None) -> Options:
    """What is asked for. Raises ValueError or OSError where it cannot be."""
    parsed = arguments.parse(Arguments, argv, description)
    case, args, timing, output = parsed.case, parsed.contenders, parsed.measure, parsed.output
    _, ranks, _ = place()
    against = args.against
    if against is None:
        against = DEFAULT_RIVALS if ranks == 1 else []
    if ranks > 1 and against:
        raise ValueError(f"{against[0]} does not take a model on {ranks} ranks: give --against none")
    if ranks > 1 and timing.compile_times:
        raise ValueError(f"--compile-times starts processes of its own, and not with {ranks} ranks")
    if case.model is not None and case.shape is not None:
        raise ValueError("give --model or --shape, not both")
    if case.layers is not None and case.shape is None:
        raise ValueError("--layers has no effect without --shape")
    if case.shape is not None:
        shape(case.shape, case.layers)
    if output.out is not None and not output.out.parent.is_dir():
        raise FileNotFoundError(f"no folder {output.out.parent} for --out")
    if output.out is not None and output.out.is_dir():
        raise ValueError(f"--out {output.out} is a folder: name a file in it")
    dtypes: list[str | torch.dtype] = [parse_dtype(name) for name in case.dtype or []]
    device = _device(case.device, ranks)

    changes = {"compression": args.compression, "budget": args.budget}
    changes = {name: value for name, value in changes.items() if value is not None}
    kept = EvictionConfig(**changes)  # type: ignore[arg-type]
    policies = {name: policy(name, **({} if name == "full" else changes)) for name in args.policies}
    for name in against:
        check_rival(name)
    names = [*policies, *against]
    if not names:
        raise ValueError("nothing to measure: give --policies or --against")
    if (
        changes
        and not any(config is not None for config in policies.values())
        and not {*against} & {*EVICTING}
    ):
        raise ValueError(f"--{next(iter(changes))} has no effect: nothing here evicts")
    if case.quantize and against:
        raise ValueError(f"{against[0]} cannot share quantised weights: give --against none")
    if timing.profile and not policies:
        raise ValueError("--profile needs a policy to look into")
    if timing.compile_times and (not args.compile or not policies):
        raise ValueError("--compile-times needs a policy that is compiled")

    period = math.lcm(*map(refresh_period, policies.values()), 4 if "kvpress4" in against else 1)
    steps = timing.steps or math.lcm(period, 64 if device.type == "cuda" else 16)
    if steps % period:
        raise ValueError(f"--steps {steps} cuts schedules in pieces; give a multiple of {period}")
    return Options(
        command=shlex.join(["python", "scripts/bench.py", *argv]),
        model=case.model,
        shape=case.shape,
        layers=case.layers,
        contexts=case.context,
        batches=case.batch,
        quantize=case.quantize,
        dtypes=dtypes or ["auto" if case.shape is None else torch.bfloat16],
        device=device,
        policies=policies,
        against=against,
        reference=next(iter([*against, *(["full"] * ("full" in policies)), *names])),
        kept=kept,
        attention=args.attention,
        compiled=args.compile,
        merge=list(args.merge),
        steps=steps,
        blocks=timing.blocks,
        period=period,
        skip_prefill=timing.skip_prefill,
        compile_times=timing.compile_times,
        profile=timing.profile,
        read_gb_per_s=timing.read_gb_per_s,
        json=output.json,
        out=output.out,
    )


def _device(name: str | None, ranks: int) -> torch.device:
    """Raises ValueError for a device that is not there."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if ranks > 1 and name in ("cpu", "cuda"):
        # `init_tensor_parallel` chooses which one: this must not allocate on another rank's.
        return torch.device(name)
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return torch.device(name)
