"""Train the learned scorer: one small bilinear form that guesses a model's attention from keys and queries.

It is distilled from the model's own attention on texts of yours, which go through the model once a step. A
tenth of them, 8 pieces at most, is held out: Spearman's rank correlation with attention, and the Jaccard of
the best tenth of the tokens, are measured there before and after.

Examples:
  python scripts/train_scorer.py --text manual.txt book.txt --out scorer.safetensors
  python scripts/train_scorer.py --text *.txt --length 2048 --steps 200 --out scorer.safetensors

The scorer (float16) and a JSON of its settings and results are written at the end. The results go to stdout,
progress to stderr. The exit code is 0, or 2 where the command line or a file is wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv.evals.reporting.table import aligned
from inertiakv.models import Transformer, load_model
from inertiakv.models.encoding import encode_text
from inertiakv.models.files import read_text
from inertiakv.scoring.learned import RANK, save_scorer, settings_path
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Switch, parse
from inertiakv.scripts.cli.console import say
from inertiakv.scripts.cli.machine import ModelOptions, check_device, loading
from inertiakv.scripts.training import distill

LEAST_LENGTH = 32
TELL_EVERY = 10
"""Steps between lines of progress where there is no terminal."""


@dataclass(frozen=True)
class TextOptions:
    """What the model reads."""

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
    queries: int = 32
    """Queries of a piece, drawn at random, that are learned from."""
    lr: float = 0.005
    """Learning rate of AdamW at the start, for a matrix of 512 inputs, and as much less for a wider one. It
    falls to nothing along a cosine."""
    seed: int = 0
    """Of everything random."""


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
    recipe = distill.Recipe(args.training.queries, args.training.steps, args.training.lr, args.training.seed)
    texts_CT, held_out_CT = distill.split(tokens_CT, recipe)
    say(f"learning from {len(texts_CT)} pieces, {len(held_out_CT)} are held out")
    scorer = distill.untrained(model, recipe)
    tell(distill.train(model, scorer, texts_CT, recipe), recipe.steps)
    say("measuring ...")
    scorer = scorer.half()
    before, after = (
        distill.measure(model, measured, held_out_CT, recipe)
        for measured in (distill.untrained(model, recipe), scorer)
    )
    settings["held_out"] = {
        "pieces": len(held_out_CT),
        "untrained": {name: before[name] for name in ("spearman", "jaccard")},
        "trained": after,
    }
    save_scorer(args.output.out, scorer, settings)
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
        "text": [
            {
                "name": path.name,
                "characters": len(text),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
            for path, text in zip(args.text.text, texts, strict=True)
        ],
        "note": args.text.note,
        "pieces": len(tokens_CT),
        "command": f"python scripts/train_scorer.py --text {names} {command}",
    }


def tell(losses: Iterator[float], steps: int) -> None:
    """Go through all steps, with a bar on a terminal and elsewhere a line now and then."""
    start = time.perf_counter()
    with tqdm(losses, total=steps, desc="training", disable=None, leave=False) as bar:
        for step, loss in enumerate(bar, 1):
            bar.set_postfix(loss=f"{loss:.3f}")
            if bar.disable and (step % TELL_EVERY == 0 or step == steps):
                seconds = (time.perf_counter() - start) / step
                say(f"step {step:,} of {steps:,}: loss {loss:.3f}, {seconds:.2f} s a step")


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    rows = [["held out", "untrained", "trained"]]
    for title, name in (("Spearman with attention", "spearman"), ("Jaccard of the best tenth", "jaccard")):
        rows.append([title, f"{before[name]:.3f}", f"{after[name]:.3f}"])
    return "\n".join(aligned(rows))


if __name__ == "__main__":
    sys.exit(main())
