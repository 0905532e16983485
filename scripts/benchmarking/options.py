"""The command line of `scripts/bench.py`, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from inertiakv import POLICIES, EvictionConfig, policy
from inertiakv.models.config import parse_dtype
from inertiakv.models.parallel import place
from inertiakv.models.quantize import QUANTIZED

from .ours import refresh_period
from .rivals import EVICTING, RIVALS, check_rival
from .shapes import SHAPES, shape

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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse(argv: Sequence[str], description: str | None) -> Options:
    """The options of a command line. Raises ValueError or OSError for one that is wrong."""
    args = _parser(description).parse_args(argv)
    _, ranks, _ = place()
    if args.against is None:
        args.against = DEFAULT_RIVALS if ranks == 1 else []
    if ranks > 1 and args.against:
        raise ValueError(f"{args.against[0]} does not take a model on {ranks} ranks: give --against none")
    if ranks > 1 and args.compile_times:
        raise ValueError(f"--compile-times starts processes of its own, and not with {ranks} ranks")
    if args.model is not None and args.shape is not None:
        raise ValueError("give --model or --shape, not both")
    if args.layers is not None and args.shape is None:
        raise ValueError("--layers has no effect without --shape")
    if args.shape is not None:
        shape(args.shape, args.layers)
    if args.out is not None and not args.out.parent.is_dir():
        raise FileNotFoundError(f"no folder {args.out.parent} for --out")
    if args.out is not None and args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder: name a file in it")
    dtypes: list[str | torch.dtype] = [parse_dtype(name) for name in args.dtype or []]
    device = _device(args.device, ranks)

    changes = {"compression": args.compression, "budget": args.budget}
    changes = {name: value for name, value in changes.items() if value is not None}
    kept = EvictionConfig(**changes)
    policies = {name: policy(name, **({} if name == "full" else changes)) for name in args.policies}
    for name in args.against:
        check_rival(name)
    if not policies and not args.against:
        raise ValueError("nothing to measure: give --policies or --against")
    if changes and not any(policies.values()) and not {*args.against} & {*EVICTING}:
        raise ValueError(f"--{next(iter(changes))} has no effect: nothing here evicts")
    if args.quantize and args.against:
        raise ValueError(f"{args.against[0]} cannot share quantised weights: give --against none")
    if args.profile and not policies:
        raise ValueError("--profile needs a policy to look into")
    if args.compile_times and (args.no_compile or not policies):
        raise ValueError("--compile-times needs a policy that is compiled")

    period = math.lcm(*map(refresh_period, policies.values()), 4 if "kvpress4" in args.against else 1)
    steps = args.steps or math.lcm(period, 64 if device.type == "cuda" else 16)
    if steps % period:
        raise ValueError(f"--steps {steps} cuts schedules in pieces; give a multiple of {period}")
    same = ["model", "shape", "layers", "quantize", "against", "attention", "merge", "blocks", "skip_prefill"]
    same += ["compile_times", "profile", "read_gb_per_s", "json", "out"]
    return Options(
        **{name: getattr(args, name) for name in same},
        command=shlex.join(["python", "scripts/bench.py", *argv]),
        contexts=args.context,
        batches=args.batch,
        dtypes=dtypes or ["auto" if args.shape is None else torch.bfloat16],
        device=device,
        policies=policies,
        reference=next(iter([*args.against, *(name for name in policies if name == "full"), *policies])),
        kept=kept,
        compiled=not args.no_compile,
        steps=steps,
        period=period,
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bench.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("what is decoded").add_argument
    add("--model", metavar="M", help=f"a folder, a name on the hub, or {DEFAULT_MODEL} (default)")
    add("--shape", metavar="S", help=f"instead, with made-up weights: {', '.join(SHAPES)}")
    add("--layers", metavar="N", type=_positive, help="that shape with so many layers")
    add(
        "--context",
        metavar="N,...",
        type=_numbers,
        default=[8000],
        help="tokens of the prompt, more than the model has positions for if need be (default: 8000)",
    )
    add(
        "--batch",
        metavar="N,...",
        type=_numbers,
        default=[1],
        help="rows; those of a batch have all to half of the context (default: 1)",
    )
    add(
        "--dtype",
        metavar="D,...",
        type=_names,
        help="bfloat16, float32, ... (default: the checkpoint's; for shapes bfloat16)",
    )
    add("--quantize", choices=QUANTIZED, help="the weights of linear layers (default: not)")
    add("--device", metavar="D", help="cpu, cuda, cuda:1, ... (default: cuda, or else cpu)")

    add = parser.add_argument_group("who decodes it").add_argument
    add(
        "--policies",
        metavar="P,...",
        type=_names,
        default=["full", "inertiakv", "lazy4", "score_free"],
        help=f"{', '.join(POLICIES)}; or none (default: full,inertiakv,lazy4,score_free)",
    )
    add("--compression", metavar="X", type=float, help="share of the prompt to evict (default: 0.9)")
    add("--budget", metavar="N", type=_positive, help="instead: tokens that each row keeps")
    add(
        "--against",
        metavar="R,...",
        type=_names,
        help=f"{', '.join(RIVALS)}; or none (default: {','.join(DEFAULT_RIVALS)}; with torchrun none). "
        "kvpress needs an environment of its own: ask for it to see which",
    )
    add(
        "--attention",
        default="auto",
        choices=("auto", "dense", "flex"),
        help="of the policies (default: auto, the faster one)",
    )
    add("--no-compile", action="store_true", help="nothing is compiled")
    add(
        "--merge",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="add the contenders of another results file; may be given several times",
    )

    add = parser.add_argument_group("how it is measured").add_argument
    add("--steps", metavar="N", type=_positive, help="decode steps of a block (default: 16, on a GPU 64)")
    add("--blocks", metavar="N", type=_positive, default=12, help="blocks of each contender (default: 12)")
    add("--skip-prefill", action="store_true", help="fill the prompt's cache with random K and V")
    add("--compile-times", action="store_true", help="also compile in new processes, cold and warm")
    add(
        "--profile",
        action="store_true",
        help="also say where a step's time goes: compiles it several times anew, which takes minutes",
    )
    add("--read-gb-per-s", metavar="X", type=_rate, help="take this bandwidth, do not measure it")

    add = parser.add_argument_group("where the results go").add_argument
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the JSON object to a file, and a profile's chart beside",
    )
    return parser


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


def _device(name: str | None, ranks: int) -> torch.device:
    """Raises ValueError for a device that is not there."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if ranks > 1 and name in ("cpu", "cuda"):
        return torch.device(name)  # `init_tensor_parallel` chooses which one; this must not allocate on another rank's
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return torch.device(name)
