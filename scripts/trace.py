"""Look into eviction rules: what they would keep step by step, how stable it is, and which scores decide.

Each prompt is prefilled once, and decoded under every rule with a cache that keeps every token, so that what
the rules would choose can be compared; then once more under each policy with its real budget, to show what is
really kept.

Examples:
  python scripts/trace.py --prompt-file book.txt --steps 128 --out traces
  python scripts/trace.py --prompt-file book.txt --policies none --scorers keydiff,recency --couplings none
  python scripts/trace.py --prompt-file book.txt --scorers learned --scorer-file scorer.safetensors
  python scripts/trace.py --prompt-file book.txt --policies inertiakv,lazy4 --scorers none --show
  python scripts/trace.py --prompt-file book.txt --scorers none --couplings none --html page.html

Tables go to stdout, or with --json one object; progress to stderr. The exit code is 0, or 2 where the
command line or a file is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv import Decoder, EvictionConfig
from inertiakv.evals.reporting import figures
from inertiakv.scripts import decode
from inertiakv.scripts.benchmarking import results
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Names, Option, Switch, parse
from inertiakv.scripts.cli.console import PrefillBar
from inertiakv.scripts.cli.machine import check_device
from inertiakv.scripts.cli.program import say
from inertiakv.scripts.tracing import analysis, page, plots, runs, tables, text
from inertiakv.scripts.tracing.page import TracedRun, traced_run
from inertiakv.scripts.tracing.runs import Rules, Run

SCORERS = ["attention", "value_norm", "entropy", "keydiff", "key_norm", "recency", "random"]


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """Which rules: such as score, for one retention set of all layers. All but --policies are inertiakv with
    one thing changed."""

    policies: Names = field(default_factory=lambda: ["inertiakv", "single", "cumulative"])
    """Named policies."""
    scorers: Names = field(default_factory=lambda: SCORERS)
    """Scorers to set against attention, which is always among them."""
    scorer_file: Path | None = None
    """The weights of the scorer learned."""
    couplings: Names = field(default_factory=lambda: ["layer_temporal", "temporal", "layer"])
    """Couplings: what of the stability is memory across steps, and what the weighting of layers."""
    step_alphas: list[float] = field(default_factory=list)
    """Memories from step to step, numbers from 0 to 1, whatever the coupling would give."""
    compression: Annotated[float | None, Option(default="0.9")] = None
    """Share of the prompt to evict."""
    budget: int | None = None
    """Instead: tokens that are kept."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How much is decoded, greedily."""

    steps: Annotated[int, Option(least=runs.LEAST_STEPS)] = 64
    """Decode steps, each of which feeds a token. An answer may end sooner."""
    ignore_eos: Switch = False
    """Go on where an answer ends."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions(decode.MachineOptions):
    """What computes, and how."""

    compile: bool = False
    """Run decode steps as compiled graphs, which every rule compiles anew: for thousands of steps."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the results go."""

    out: Annotated[Path | None, Option(metavar="DIR")] = None
    """A folder for trace.json, tables.md, trace.html and, where matplotlib is installed, plots."""
    html: Path | None = None
    """Write one page, which needs no network: the text coloured by what is kept, the sets over time, and a
    slider over steps."""
    show: Switch = False
    """Print the text as each policy keeps it, too."""
    json: Switch = False
    """Print what trace.json says, and nothing else, to stdout."""


@dataclass(frozen=True, kw_only=True)
class Arguments(decode.PromptOptions, RuleOptions, RunOptions, MachineOptions, OutputOptions):
    command: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: trace(parse(Arguments, argv, __doc__, "trace.py")))


def trace(args: Arguments) -> None:
    """Run the rules over the prompts. What is wrong by itself is found before the model is loaded."""
    rules = read_rules(args)
    given = decode.read_prompts(args)
    if args.show and args.json:
        raise ValueError("--show has no effect with --json, which prints one object")
    if args.show and not rules.policies:
        raise ValueError("--show shows what policies keep: give --policies")
    if args.html is not None and not rules.policies:
        raise ValueError("--html shows what policies keep: give --policies")
    if args.html is not None and (args.html.is_dir() or not args.html.parent.is_dir()):
        raise ValueError(f"--html {args.html} is no file in a folder that is there")
    if args.out is not None:
        args.out.mkdir(exist_ok=True)
    check_device(args.device)

    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        model, tokenizer = decode.load(args)
        traced = [
            trace_prompt(model, tokenizer, row, rules, args, f"prompt {number}")
            for number, row in enumerate(decode.encode(tokenizer, given, args), 1)
        ]
    report = {
        "command": args.command,
        "model": decode.describe(args, model),
        "rules": {label: dataclasses.asdict(rule) for label, rule in rules.labelled.items()},
        "prompts": [one.report for one in traced],
        "mean": analysis.average([one.report["statistics"] for one in traced]),
    }
    shown = [run for one in traced for run in one.runs]
    if args.out is not None:
        write(args.out, report, shown, traced[0].evicting)
    if args.html is not None:
        args.html.write_text(page.page(shown), encoding="utf-8")
    if args.json:
        print(json.dumps(analysis.plain(report)))
        return
    print("\n\n".join(table.text() for table in tables.tables(report["mean"])))
    for run in shown if args.show else ():
        print("\n" + text.terminal(run.text))


def read_rules(args: RuleOptions) -> Rules:
    kept = {"compression": args.compression, "budget": args.budget}
    kept = {name: value for name, value in kept.items() if value is not None}
    return runs.choose_rules(
        args.policies, args.scorers, args.couplings, args.step_alphas, kept, args.scorer_file
    )


@dataclass(frozen=True)
class TracedPrompt:
    report: dict[str, Any]
    evicting: dict[str, Run]
    """The policies' runs with their real budgets."""
    runs: list[TracedRun]


def trace_prompt(
    model: Any, tokenizer: Any, prompt: list[int], rules: Rules, args: Arguments, name: str
) -> TracedPrompt:
    """Every rule over one prompt. Raises ValueError where its answer is over too soon."""
    machine: dict[str, Any] = {"compile": args.compile, "attention": args.attention}
    how = machine | {"steps": args.steps, "eos_token_ids": [] if args.ignore_eos else None}
    source = Decoder(model, None, **machine)
    with contextlib.closing(PrefillBar(len(prompt))) as bar:
        source.prefill(prompt, max_new_tokens=args.steps + 1, progress=bar)

    different = list(dict.fromkeys(rules.labelled.values()))
    total = len(different) + len(rules.policies)
    say(f"{name}: {total} runs of {args.steps} steps ...")
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
    shown = [
        traced_run(
            text.traced_text(f"{name}, {policy}", tokenizer, prompt, of),
            of,
            analysis.churn_series(uncut[rules.policies[policy]]),
        )
        for policy, of in evicting.items()
    ]
    return TracedPrompt(report, evicting, shown)


def write(folder: Path, report: dict[str, Any], shown: Sequence[TracedRun], evicting: dict[str, Run]) -> None:
    """Everything into a folder. Pictures are of the first prompt."""
    results.write(folder / "trace.json", analysis.plain(report))
    (folder / "tables.md").write_text(tables.page(report), encoding="utf-8")
    if shown:
        (folder / "trace.html").write_text(page.page(shown), encoding="utf-8")
    if not figures.available():
        say(figures.MISSING)
        return
    plots.churn(folder / "churn.png", report["prompts"][0]["churn"])
    if evicting:
        plots.retention(folder / "retention.png", evicting)


if __name__ == "__main__":
    sys.exit(main())
