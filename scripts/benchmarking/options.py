"""The command line of `scripts/bench.py`, checked before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from inertiakv import EvictionConfig, policy
from inertiakv.models.config import parse_dtype
from inertiakv.models.parallel import place
from inertiakv.models.quantize import QUANTIZED
from inertiakv.scripts.cli import arguments
from inertiakv.scripts.cli.arguments import Count, Counts, Names, Option, Switch
from inertiakv.scripts.cli.machine import check_device

from .ours import refresh_period
from .rivals import EVICTING, check_rival
from .shapes import shape

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_RIVALS = ["transformers", "transformers-static"]


@dataclass(frozen=True, kw_only=True)
class CaseOptions:
    """What is decoded."""

    model: Annotated[str | None, Option(default=DEFAULT_MODEL)] = None
    """A folder, or a name on the Hugging Face hub."""
    shape: Annotated[str | None, Option(metavar="NAME")] = None
    """Instead, with random weights: a well-known shape (an unknown name lists them)."""
    layers: Count | None = None
    """That shape with so many layers."""
    context: Counts = field(default_factory=lambda: [8000])
    """Tokens of the prompt, more than the model has positions for if need be."""
    batch: Counts = field(default_factory=lambda: [1])
    """Rows; those of a batch have from all to half of the context."""
    dtype: Annotated[list[str], Option("D,...", "the checkpoint's; for shapes bfloat16")] = field(
        default_factory=list
    )
    """bfloat16, float32, ..."""
    quantize: Annotated[str | None, Option(choices=QUANTIZED)] = None
    """Of the weights of linear layers."""
    device: Annotated[str | None, Option(default="cuda, or else cpu")] = None
    """cpu, cuda, cuda:1, ..."""


@dataclass(frozen=True, kw_only=True)
class ContenderOptions:
    """Who decodes it."""

    policies: Names = field(default_factory=lambda: ["full", "inertiakv", "lazy4", "score_free"])
    """Policies of inertiakv."""
    compression: Annotated[float | None, Option(default="0.9")] = None
    """Share of the prompt to evict."""
    budget: Count | None = None
    """Instead: tokens that each row keeps."""
    against: Annotated[
        list[str] | None, Option("NAME,...|none", f"{','.join(DEFAULT_RIVALS)}; with torchrun none")
    ] = None
    """Other implementations: transformers, transformers-static, transformers-inertiakv, kvpress and kvpress4.
    The last two need an environment of their own: ask for them to see which."""
    attention: Literal["auto", "dense", "flex"] = "auto"
    """Of the policies; auto: the faster one."""
    compile: bool = True
    """Decode with compiled graphs."""
    merge: Annotated[tuple[Path, ...], Option(repeat=True)] = ()
    """Add the contenders of another results file. May be given several times."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """How it is measured."""

    steps: Annotated[int | None, Option("N", "16, on a GPU 64", least=1)] = None
    """Decode steps of a block."""
    blocks: Count = 12
    """Blocks of each contender."""
    skip_prefill: Switch = False
    """Fill the prompt's cache with random K and V."""
    compile_times: Switch = False
    """Also compile in new processes, cold and warm."""
    profile: Switch = False
    """Also say where a step's time goes: compiles it several times anew, which takes minutes."""
    read_gb_per_s: float | None = None
    """Take this bandwidth, do not measure it."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the results go."""

    json: Switch = False
    """Print one JSON object instead of tables."""
    out: Path | None = None
    """Write the JSON object to a file, and a profile's chart beside it."""


@dataclass(frozen=True, kw_only=True)
class Options(CaseOptions, ContenderOptions, MeasureOptions, OutputOptions):
    """What is asked for, and what follows from it."""

    command: str = ""

    @property
    def name(self) -> str:
        """The model's or the shape's."""
        return self.shape or self.model or DEFAULT_MODEL

    @property
    def dtypes(self) -> list[str | torch.dtype]:
        default = "auto" if self.shape is None else torch.bfloat16
        return [*map(parse_dtype, self.dtype)] or [default]

    @cached_property
    def on(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @cached_property
    def changes(self) -> dict[str, Any]:
        kept = {"compression": self.compression, "budget": self.budget}
        return {name: value for name, value in kept.items() if value is not None}

    @cached_property
    def rules(self) -> dict[str, EvictionConfig | None]:
        return {name: policy(name, **({} if name == "full" else self.changes)) for name in self.policies}

    @cached_property
    def kept(self) -> EvictionConfig:
        """What rivals keep that evict."""
        return EvictionConfig(**self.changes)

    @cached_property
    def rivals(self) -> list[str]:
        return self.against if self.against is not None else DEFAULT_RIVALS if place()[1] == 1 else []

    @property
    def reference(self) -> str:
        """The contender that the times of the others are relative to."""
        return [*self.rivals, *(["full"] if "full" in self.policies else self.policies)][0]

    @property
    def period(self) -> int:
        """Steps after which the schedules of all contenders repeat together."""
        return math.lcm(*map(refresh_period, self.rules.values()), 4 if "kvpress4" in self.rivals else 1)

    @property
    def block(self) -> int:
        """Steps of a block."""
        return self.steps or math.lcm(self.period, 64 if self.on.type == "cuda" else 16)


def parse(argv: Sequence[str] | None, description: str | None) -> Options:
    """What is asked for. Raises ValueError or OSError where it cannot be."""
    options = arguments.parse(Options, argv, description, "bench.py")
    _check_places(options)
    rivals, rules, ranks = options.rivals, options.rules, place()[1]
    if ranks > 1 and rivals:
        raise ValueError(f"{rivals[0]} does not take a model on {ranks} ranks: give --against none")
    if ranks > 1 and options.compile_times:
        raise ValueError(f"--compile-times starts processes of its own, and not with {ranks} ranks")
    _ = options.dtypes, options.kept  # that they can be
    for name in rivals:
        check_rival(name)
    if not rules and not rivals:
        raise ValueError("nothing to measure: give --policies or --against")
    if options.changes and not any(rules.values()) and not {*rivals} & {*EVICTING}:
        raise ValueError(f"--{next(iter(options.changes))} has no effect: nothing here evicts")
    if options.quantize and rivals:
        raise ValueError(f"{rivals[0]} cannot share quantised weights: give --against none")
    if options.profile and not rules:
        raise ValueError("--profile needs a policy to look into")
    if options.compile_times and (not options.compile or not rules):
        raise ValueError("--compile-times needs a policy that is compiled")
    if options.block % options.period:
        raise ValueError(
            f"--steps {options.steps} cuts schedules in pieces; give a multiple of {options.period}"
        )
    return options


def _check_places(options: Options) -> None:
    """Raise ValueError or OSError for a model, a device or a file that is not there."""
    if options.model is not None and options.shape is not None:
        raise ValueError("give --model or --shape, not both")
    if options.layers is not None and options.shape is None:
        raise ValueError("--layers has no effect without --shape")
    if options.shape is not None:
        shape(options.shape, options.layers)
    if options.out is not None and not options.out.parent.is_dir():
        raise FileNotFoundError(f"no folder {options.out.parent} for --out")
    if options.out is not None and options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder: name a file in it")
    if place()[1] == 1 or options.device not in (None, "cpu", "cuda"):
        check_device(options.device)  # not the first device, where `init_tensor_parallel` chooses one
