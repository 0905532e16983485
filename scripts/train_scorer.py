"""Train the learned scorer: one small bilinear form that guesses a model's attention from keys and queries.

It is distilled from the model's own attention on texts of yours, which go through the model once a step. A
tenth of them, 8 pieces at most, is held out: Spearman's rank correlation with attention, and the Jaccard of
the best tenth of the tokens, are measured there before and after.

Examples:
  python scripts/train_scorer.py --text manual.txt book.txt --out scorer.safetensors
  python scripts/train_scorer.py --text *.txt --length 2048 --steps 200 --out scorer.safetensors
  python scripts/train_scorer.py --text *.txt --length 2048 --steps 200 --out scorer.safetensors --resume

The scorer (float16) and a JSON of its settings and results are written at the end. Until then a checkpoint
stands beside them, from which --resume goes on, to the same scorer, when a run was broken off. The results go
to stdout, progress to stderr. The exit code is 0, or 2 where the command line or a file is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv.models import Transformer, load_model
from inertiakv.models.encoding import encode_text
from inertiakv.scoring.learned import RANK, save_scorer, settings_path
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Switch, parse
from inertiakv.scripts.cli.console import say
from inertiakv.scripts.cli.machine import ModelOptions, check_device, loading
from inertiakv.scripts.cli.prompts import read_text
from inertiakv.scripts.training.distill import Distillation, Quality, Recipe

LEAST_LENGTH = 32
SAVE_EVERY = 10
"""Steps between checkpoints."""


@dataclass(frozen=True)
class TextOptions:
    """What the model reads while its attention is watched."""

    text: tuple[Path, ...] = ()
    """Text files in UTF-8, joined and cut into pieces."""
    length: int = 1024
    """Tokens of a piece. Queries come from its second half."""
    note: str | None = None
    """What the texts are, for the settings file."""


@dataclass(frozen=True)
class TrainingOptions:
    """How it learns: one piece of text a step, all layers of it."""

    steps: int = 400
    """Steps in all, those before --resume included."""
    queries: int = 32
    """Queries of a piece, drawn at random, that are learned from."""
    lr: float = 0.005
    """Learning rate of AdamW at the start, for a matrix of 512 inputs, and as much less for a wider one. It
    falls to nothing along a cosine."""
    seed: int = 0
    """Of everything random."""
    resume: Switch = False
    """Go on with a run of the same options that was broken off."""


@dataclass(frozen=True)
class MachineOptions(ModelOptions):
    """Whose attention is learned, and what computes."""


@dataclass(frozen=True)
class OutputOptions:
    """What comes of it."""

    out: Path = Path("scorer.safetensors")
    """The scorer's file; its settings are written beside it, as .json."""
    json: Switch = False
    """Print the settings and results as one JSON object, and nothing else, to stdout."""


@dataclass(frozen=True)
class Arguments:
    text: TextOptions
    training: TrainingOptions
    machine: MachineOptions
    output: OutputOptions

    @property
    def checkpoint(self) -> Path:
        return self.output.out.with_suffix(".checkpoint.safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: run(parse(Arguments, argv, __doc__)))


def run(args: Arguments) -> None:
    """Train, measure, write. What is wrong by itself is found before the model is loaded."""
    check(args)
    texts = [read_text(path) for path in args.text.text]
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        say(f"loading {args.machine.model} ...")
        with loading():
            model, tokenizer = load_model(
                args.machine.model, dtype=args.machine.dtype, device=args.machine.device
            )
    tokens_CT = pieces(model, encode_text(tokenizer, "\n\n".join(texts)), args.text.length)
    settings = describe(args, texts, tokens_CT, model)
    recipe = Recipe(args.training.queries, args.training.steps, args.training.lr, args.training.seed)
    distillation = Distillation(model, tokens_CT, recipe)
    say(f"learning from {len(distillation.texts_CT)} pieces, {len(distillation.held_out_CT)} are held out")
    if args.training.resume:
        distillation.load(args.checkpoint, settings)
        say(f"going on after step {distillation.step:,}")
    train(distillation, args.checkpoint, settings)
    say("measuring ...")
    scorer = copy.deepcopy(distillation.scorer).half()
    before, after = distillation.measure(distillation.untrained()), distillation.measure(scorer)
    settings["held_out"] = {
        "pieces": len(distillation.held_out_CT),
        "untrained": {"spearman": before.spearman, "jaccard": before.jaccard},
        "trained": dataclasses.asdict(after),
    }
    save_scorer(args.output.out, scorer, settings)
    args.checkpoint.unlink()
    say(f"wrote {args.output.out} and {settings_path(args.output.out)}")
    print(json.dumps(settings) if args.output.json else table(before, after))


def check(args: Arguments) -> None:
    """Raise ValueError for options that cannot be."""
    if not args.text.text:
        raise ValueError("no text: give --text FILE..., some hundred kilobytes of it")
    if args.text.length < LEAST_LENGTH:
        raise ValueError(f"--length must be at least {LEAST_LENGTH}, got {args.text.length}")
    for name in ("steps", "queries"):
        if (value := getattr(args.training, name)) < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 < args.training.lr < math.inf:
        raise ValueError(f"--lr must be a number above 0, got {args.training.lr}")
    settings_path(args.output.out)  # raises for a name that does not do
    folder = args.output.out.parent
    if not folder.is_dir():
        raise ValueError(f"--out {args.output.out}: there is no folder {folder}")
    if args.training.resume and not args.checkpoint.is_file():
        raise ValueError(f"nothing to resume: there is no {args.checkpoint}")
    if not args.training.resume and args.checkpoint.exists():
        raise ValueError(
            f"{args.checkpoint} is left of a run that was broken off: --resume goes on with it; remove it to "
            "start anew"
        )
    check_device(args.machine.device)


def pieces(model: Transformer, tokens: list[int], length: int) -> Tensor:
    """Token ids cut into pieces, [C, T]; what is left over at the end is left out. Raises ValueError for
    pieces longer than the model's positions."""
    if length > model.config.max_positions:
        raise ValueError(
            f"--length {length:,} is more than the model's {model.config.max_positions:,} positions"
        )
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)


def describe(args: Arguments, texts: list[str], tokens_CT: Tensor, model: Transformer) -> dict[str, Any]:
    """What made the scorer, for the file beside it. Names of files and folders, and not where they are."""
    folder = Path(args.machine.model).expanduser()
    name = folder.resolve().name if folder.is_dir() else args.machine.model
    recipe = {option: getattr(args.training, option) for option in ("steps", "queries", "lr", "seed")}
    given = {"model": name, "dtype": args.machine.dtype, "length": args.text.length, **recipe}
    names = " ".join(path.name for path in args.text.text)
    command = " ".join(f"--{option} {value}" for option, value in given.items())
    sizes = {size: getattr(model.config, size) for size in ("num_heads", "num_kv_heads", "head_dim")}
    return {
        **given,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": name if folder.is_dir() else model.source,
        "sizes": {**sizes, "rank": RANK},
        "text": [_fingerprint(path, text) for path, text in zip(args.text.text, texts, strict=True)],
        "note": args.text.note,
        "pieces": len(tokens_CT),
        "command": f"python scripts/train_scorer.py --text {names} {command}",
    }


def _fingerprint(path: Path, text: str) -> dict[str, Any]:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"name": path.name, "characters": len(text), "sha256": digest}


def train(distillation: Distillation, checkpoint: Path, settings: dict[str, Any]) -> None:
    """All steps that are left, with a bar on a terminal and elsewhere a line now and then."""
    steps = distillation.recipe.steps
    bar = tqdm(total=steps, initial=distillation.step, desc="training", disable=None, leave=False)
    with contextlib.closing(bar):
        start, first = time.perf_counter(), distillation.step
        while distillation.step < steps:
            loss = distillation.train_step()
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
            if distillation.step % SAVE_EVERY and distillation.step < steps:
                continue
            distillation.save(checkpoint, settings)
            if bar.disable:
                seconds = (time.perf_counter() - start) / (distillation.step - first)
                say(f"step {distillation.step:,} of {steps:,}: loss {loss:.3f}, {seconds:.2f} s a step")


def table(before: Quality, after: Quality) -> str:
    rows = [
        ("held out", "untrained", "trained"),
        ("Spearman with attention", f"{before.spearman:.3f}", f"{after.spearman:.3f}"),
        ("Jaccard of the best tenth", f"{before.jaccard:.3f}", f"{after.jaccard:.3f}"),
    ]
    return "\n".join(f"{name:<27}{left:>10}{right:>10}" for name, left, right in rows)


if __name__ == "__main__":
    sys.exit(main())
