"""Look into eviction rules: what they would keep step by step, how stable it is, and which scores decide.

Each prompt is prefilled once, and decoded under every rule with a cache that keeps every token, so that what
the rules would choose can be compared; then once more under each policy with its real budget, to show what is
really kept.

Examples:
  python scripts/trace.py --prompt-file book.txt --steps 128 --out traces
  python scripts/trace.py --prompt-file book.txt --policies none --scorers keydiff,recency --couplings none
  python scripts/trace.py --prompt-file book.txt --scorers learned --scorer-file scorer.safetensors
  python scripts/trace.py --prompt-file book.txt --policies inertiakv,lazy4 --scorers none --show

Tables go to stdout, or with --json one object; progress to stderr. The exit code is 0, or 2 where the
command line or a file is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv import Decoder, EvictionConfig
from inertiakv.evals.reporting import figures
from inertiakv.evals.reporting.table import Table
from inertiakv.scripts import decode
from inertiakv.scripts.benchmarking import results
from inertiakv.scripts.cli import program, prompts
from inertiakv.scripts.cli.arguments import Option, Switch, numbers, parse
from inertiakv.scripts.cli.console import PrefillBar, say
from inertiakv.scripts.cli.machine import check_device
from inertiakv.scripts.tracing import analysis, plots, runs, tables, text
from inertiakv.scripts.tracing.runs import Rules, Run
from inertiakv.scripts.tracing.text import TracedText

Names = Annotated[str, Option(metavar="NAME,...|none")]


@dataclass(frozen=True)
class RuleOptions:
    """Which rules: such as score, for one retention set of all layers. All but --policies are inertiakv with
    one thing changed."""

    policies: Names = "inertiakv,single,cumulative"
    """Named policies."""
    scorers: Names = "attention,value_norm,entropy,keydiff,key_norm,recency,random"
    """Scorers to set against attention, which is always among them."""
    scorer_file: Path | None = None
    """The weights of the scorer learned."""
    couplings: Names = "layer_temporal,temporal,layer"
    """Couplings: what of the stability is memory across steps, and what the weighting of layers."""
    step_alphas: Names = "none"
    """Memories from step to step, numbers from 0 to 1, whatever the coupling would give."""
    compression: Annotated[float | None, Option(default="0.9")] = None
    """Share of the prompt to evict."""
    budget: int | None = None
    """Instead: tokens that are kept."""


@dataclass(frozen=True)
class RunOptions:
    """How much is decoded, greedily."""

    steps: int = 64
    """Decode steps, each of which feeds a token. An answer may end sooner."""
    ignore_eos: Switch = False
    """Go on where an answer ends."""


@dataclass(frozen=True)
class MachineOptions(decode.MachineOptions):
    """What computes, and how."""

    compile: bool = False
    """Run decode steps as compiled graphs, which every rule compiles anew: for thousands of steps."""


@dataclass(frozen=True)
class OutputOptions:
    """Where the results go."""

    out: Annotated[Path | None, Option(metavar="DIR")] = None
    """A folder for trace.json, tables.md, text.html and, where matplotlib is installed, plots."""
    show: Switch = False
    """Print the text as each policy keeps it, too; in colours on a terminal, unless NO_COLOR is set."""
    json: Switch = False
    """Print what trace.json says, and nothing else, to stdout."""


@dataclass(frozen=True)
class Arguments:
    prompt: decode.PromptOptions
    rules: RuleOptions
    run: RunOptions
    machine: MachineOptions
    output: OutputOptions


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "scripts/trace.py", *argv])
    return program.run(lambda: trace(parse(Arguments, argv, __doc__), command))


def trace(args: Arguments, command: str) -> None:
    """Run the rules over the prompts. What is wrong by itself is found before the model is loaded."""
    rules = read_rules(args.rules)
    given = decode.read_prompts(args.prompt)
    if args.run.steps < runs.LEAST_STEPS:
        raise ValueError(f"--steps must be at least {runs.LEAST_STEPS}, got {args.run.steps}")
    if args.output.show and args.output.json:
        raise ValueError("--show has no effect with --json, which prints one object")
    if args.output.show and not rules.policies:
        raise ValueError("--show shows what policies keep: give --policies")
    if args.output.out is not None:
        args.output.out.mkdir(exist_ok=True)
    check_device(args.machine.device)

    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        say(f"loading {args.machine.model} ...")
        model, tokenizer = decode.load(args.machine)
        rows = [prompts.encode(tokenizer, p, raw=args.prompt.raw, system=args.prompt.system) for p in given]
        traced = [
            trace_prompt(model, tokenizer, row, rules, args, f"prompt {number}")
            for number, row in enumerate(rows, 1)
        ]
    report = {
        "command": command,
        "model": {
            "name": args.machine.model,
            "source": str(model.source),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "rules": {label: dataclasses.asdict(rule) for label, rule in rules.labelled.items()},
        "prompts": [one.report for one in traced],
        "mean": analysis.average([one.report["statistics"] for one in traced]),
    }
    made = tables.tables(report["mean"])
    if args.output.out is not None:
        write(args.output.out, report, made, traced)
    if args.output.json:
        print(json.dumps(analysis.plain(report)))
        return
    print("\n\n".join(table.text() for table in made))
    if args.output.show:
        colour = text.in_colour(sys.stdout)
        for shown in (shown for one in traced for shown in one.texts):
            print("\n" + text.terminal(shown, colour))


def read_rules(args: RuleOptions) -> Rules:
    def names(listed: str) -> list[str]:
        return [] if listed == "none" else list(dict.fromkeys(listed.split(",")))

    kept = {"compression": args.compression, "budget": args.budget}
    return runs.choose_rules(
        names(args.policies),
        names(args.scorers),
        names(args.couplings),
        numbers("step-alphas", None if args.step_alphas == "none" else args.step_alphas, float),
        {name: value for name, value in kept.items() if value is not None},
        args.scorer_file,
    )


@dataclass(frozen=True)
class TracedPrompt:
    report: dict[str, Any]
    evicting: dict[str, Run]
    """The policies' runs with their real budgets."""
    texts: list[TracedText]


def trace_prompt(
    model: Any, tokenizer: Any, prompt: list[int], rules: Rules, args: Arguments, name: str
) -> TracedPrompt:
    """Every rule over one prompt. Raises ValueError where its answer is over too soon."""
    machine: dict[str, Any] = {"compile": args.machine.compile, "attention": args.machine.attention}
    how = machine | {"steps": args.run.steps, "eos_token_ids": [] if args.run.ignore_eos else None}
    source = Decoder(model, None, **machine)
    with contextlib.closing(PrefillBar(len(prompt))) as bar:
        source.prefill(prompt, max_new_tokens=args.run.steps + 1, progress=bar)

    different = list(dict.fromkeys(rules.labelled.values()))
    total = len(different) + len(rules.policies)
    say(f"{name}: {total} runs of {args.run.steps} steps ...")
    with tqdm(total=total, desc=name, unit=" runs", disable=None, leave=False) as progress:

        def run(recorder: Callable[..., Run], of: EvictionConfig | Run) -> Run:
            done = recorder(source, of, **how)
            progress.update()
            return done

        same = runs.same_steps([run(runs.record, rule) for rule in different])
        uncut = dict(zip(different, same, strict=True))
        evicting = {policy: run(runs.record_evicting, uncut[rule]) for policy, rule in rules.policies.items()}
    say(f"{name}: statistics ...")
    report = {
        "tokens": len(prompt),
        "budget": same[0].budget,
        "steps": same[0].trace.steps,
        "answer": same[0].tokens,
        "statistics": analysis.analyse(rules, uncut),
        "churn": {label: analysis.churn_series(uncut[rule]) for label, rule in rules.distinct.items()},
    }
    texts = [text.traced_text(f"{name}, {policy}", tokenizer, prompt, of) for policy, of in evicting.items()]
    return TracedPrompt(report, evicting, texts)


def write(
    folder: Path, report: dict[str, Any], made: Sequence[Table], traced: Sequence[TracedPrompt]
) -> None:
    """Everything into a folder. Pictures are of the first prompt, but for the means of Jaccard."""
    results.write(folder / "trace.json", analysis.plain(report))
    (folder / "tables.md").write_text(tables.page(report, made), encoding="utf-8")
    if texts := [shown for one in traced for shown in one.texts]:
        (folder / "text.html").write_text(text.page(texts), encoding="utf-8")
    if not figures.available():
        say(figures.MISSING)
        return
    first = traced[0]
    plots.churn(folder / "churn.png", first.report["churn"])
    if first.evicting:
        plots.retention(folder / "retention.png", first.evicting)
    if len(report["mean"]["spectrum"]) > 1:
        plots.matrix(folder / "jaccard.png", report["mean"]["jaccard"]["layers"])


if __name__ == "__main__":
    sys.exit(main())
