"""Train the learned scorer: one small bilinear form that guesses a model's attention from keys and queries.

It is distilled from the model's own attention on texts of yours, which go through the model once a step. A
tenth of them, 8 pieces at most, is held out: Spearman's rank correlation with attention, and the Jaccard of
the best tenth of the tokens, are measured there before and after.

Examples:
  python scripts/train_scorer.py --text manual.txt book.txt --out scorer.safetensors
  python scripts/train_scorer.py --text *.txt --length 2048 --steps 200 --out scorer.safetensors

The scorer (float16) and a JSON of its settings and results are written at the end. The results go to stdout,
too, progress to stderr. The exit code is 0, or 2 where the command line or a file is wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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
from inertiakv.scripts.cli.arguments import Option, parse
from inertiakv.scripts.cli.machine import ModelOptions, check_device, loading
from inertiakv.scripts.cli.program import say
from inertiakv.scripts.training import distill
from inertiakv.scripts.training.distill import TrainingOptions

TELL_EVERY = 10
"""Steps between lines of progress where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What the model reads."""

    text: tuple[Path, ...] = ()
    """Text files in UTF-8, joined and cut into pieces."""
    length: Annotated[int, Option(least=32)] = 1024
    """Tokens of a piece. Queries come from its second half."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What comes of it."""

    out: Path = Path("scorer.safetensors")
    """The scorer's file; its settings and results are written beside it, as .json."""


@dataclass(frozen=True, kw_only=True)
class Arguments(TextOptions, TrainingOptions, ModelOptions, OutputOptions): ...


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: run(parse(Arguments, argv, __doc__)))


def run(args: Arguments) -> None:
    """Train, measure, write. What is wrong by itself is found before the model is loaded."""
    check(args)
    texts = [read_text(path) for path in args.text]
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        say(f"loading {args.model} ...")
        with loading():
            model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)
    tokens_CT = pieces(model, encode_text(tokenizer, "\n\n".join(texts)), args.length)
    texts_CT, held_out_CT = distill.split(tokens_CT, args)
    say(f"learning from {len(texts_CT)} pieces, {len(held_out_CT)} are held out")
    scorer = distill.untrained(model, args)
    tell(distill.train(model, scorer, texts_CT, args), args.steps)
    say("measuring ...")
    scorer = scorer.half()
    before, after = (
        distill.measure(model, measured, held_out_CT, args)
        for measured in (distill.untrained(model, args), scorer)
    )
    held_out = {"pieces": len(held_out_CT), "untrained": before, "trained": after}
    save_scorer(args.out, scorer, describe(args, texts, len(tokens_CT), model) | {"held_out": held_out})
    say(f"wrote {args.out} and {settings_path(args.out)}")
    print(table(before, after))


def check(args: Arguments) -> None:
    """Raise ValueError for options that cannot be."""
    if not args.text:
        raise ValueError("no text: give --text FILE..., some hundred kilobytes of it")
    if not 0 < args.lr < math.inf:
        raise ValueError(f"--lr must be a number above 0, got {args.lr}")
    settings_path(args.out)  # raises for a name that does not do
    if not args.out.parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {args.out.parent}")
    check_device(args.device)


def pieces(model: Transformer, tokens: list[int], length: int) -> Tensor:
    """Token ids cut into pieces, [C, T]; what is left over at the end is left out. Raises ValueError for
    pieces longer than the model's positions."""
    most = model.config.max_positions
    if length > most:
        raise ValueError(f"--length {length:,} is more than the model's {most:,} positions")
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)


def describe(args: Arguments, texts: list[str], count: int, model: Transformer) -> dict[str, Any]:
    """What made the scorer, for the file beside it. Names of files and folders, and not where they are."""
    folder = Path(args.model).expanduser()
    name = folder.resolve().name if folder.is_dir() else args.model
    recipe = {option: getattr(args, option) for option in ("length", "steps", "queries", "lr", "seed")}
    sizes = {size: getattr(model.config, size) for size in ("num_heads", "num_kv_heads", "head_dim")}
    hashes = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return {
        "model": name,
        **recipe,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": name if folder.is_dir() else model.source,
        "sizes": {**sizes, "rank": RANK},
        "text": [
            {"name": path.name, "sha256": digest} for path, digest in zip(args.text, hashes, strict=True)
        ],
        "pieces": count,
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


def table(before: dict[str, float], after: dict[str, float]) -> str:
    rows = [["held out", "untrained", "trained"]]
    for title, name in (("Spearman with attention", "spearman"), ("Jaccard of the best tenth", "jaccard")):
        rows.append([title, f"{before[name]:.3f}", f"{after[name]:.3f}"])
    return "\n".join(aligned(rows))


if __name__ == "__main__":
    sys.exit(main())
