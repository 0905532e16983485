"""Ask a model the questions of benchmarks while its KV cache keeps a fraction of each prompt.

Every prompt is read once, and answered under each rule: greedily, until the model ends its answer or the
benchmark does. Tasks are ruler, longbench, longbench-v2, niah (the needle grid) and chains (long answers), or
one of theirs, as ruler:vt. A policy is a name of `inertiakv/policies.py`, and what is changed of it, as
lazy4:pool=13 or inertiakv:alpha=0.3:sinks=4; each one runs at each --compression, or else each --budget.

Examples:
  python scripts/eval.py --tasks ruler:niah_single_1,ruler:vt --lengths 1024,2048 --samples 50 --out run1
  python scripts/eval.py --tasks niah --lengths 2048,4096 --policies full,lazy4,snapkv --compression 0.9,0.75
  python scripts/eval.py --tasks longbench --data LongBench --model meta-llama/Llama-3.1-8B-Instruct --batch 4
  python scripts/eval.py --tasks chains --lengths 1024 --samples 20 --policies full,lazy4,tova --budget 128
  torchrun --nproc-per-node 4 scripts/eval.py --tasks ruler --lengths 16384 --samples 500 --resume
  torchrun --nproc-per-node 8 scripts/eval.py --tensor-parallel-size 4 --model BIG --tasks longbench

--out becomes a folder with run_meta.json (every setting, versions, hashes) and records.jsonl, a line for each
answer, written as it comes. A run that was stopped goes on with the same command and --resume: no record is
lost, none is made twice. With other tasks, lengths, samples, policies or budgets --resume adds to what is
there. Under torchrun each process answers every n-th sample, on a GPU of its own where there are GPUs, and
writes records-RANK.jsonl; another number of processes may go on with them. A model that no GPU holds is held
by --tensor-parallel-size processes together, and samples are shared among such groups.

Scores go to stdout, or with --json one object; progress to stderr. The exit code is 0, or 2 where the command
line or a file is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv.compiling.collectives import TensorParallel
from inertiakv.decoding.tensor_parallel import check_rule
from inertiakv.evals import registry
from inertiakv.evals.essays import Essays, load_essays
from inertiakv.evals.records import NAME, Mean, Record, means, read_meta
from inertiakv.evals.reporting.table import aligned
from inertiakv.evals.rules import Rule, choose_rules, label
from inertiakv.evals.run import Evaluation, count, make_groups
from inertiakv.evals.task import Prompting
from inertiakv.models.parallel import init_tensor_parallel
from inertiakv.scripts import decode
from inertiakv.scripts.cli import program, prompts
from inertiakv.scripts.cli.arguments import Count, Counts, Option, Switch, parse
from inertiakv.scripts.cli.machine import check_device, loading
from inertiakv.scripts.cli.program import say
from inertiakv.scripts.evaluating import meta
from inertiakv.scripts.evaluating.process import Process, run


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What is asked."""

    tasks: Annotated[list[str], Option(metavar="TASK,...")]
    """Benchmarks, and tasks of benchmarks."""
    lengths: Counts = field(default_factory=list)
    """Tokens of prompt and answer together, for tasks that make prompts of any length."""
    samples: Annotated[int | None, Option(default="all there are", least=1)] = None
    """The first so many of each task and length."""
    seed: int = 42
    """Of what tasks make by chance."""
    template: Literal["chat", "none"] = "chat"
    """The tokenizer's chat template around a prompt, or the prompt as it is."""
    template_args: prompts.TemplateArgs = ()
    """What the chat template is given beside messages, as enable_thinking=false."""
    essays: Annotated[str | None, Option(metavar="FILE|hub", default="the project's")] = None
    """The text that needles are hidden in."""
    data: Annotated[Path | None, Option(metavar="DIR", default="from the hub")] = None
    """The folder with the files of all benchmarks that have data."""


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """By which rules tokens are evicted."""

    policies: Annotated[list[str], Option(metavar="NAME[:FIELD=VALUE...],...")] = field(
        default_factory=lambda: ["full", "inertiakv"]
    )
    """Named policies; full keeps every token."""
    compression: Annotated[list[float], Option(default="0.9")] = field(default_factory=list)
    """Shares of the prompt to evict."""
    budget: list[int] = field(default_factory=list)
    """Instead: tokens that are kept."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions(decode.MachineOptions):
    """What computes, and how."""

    batch: Count = 1
    """Prompts that are read and answered together."""
    tensor_parallel_size: int = 1
    """Processes, and so GPUs, that hold a model together, with torchrun."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the results go."""

    out: Annotated[Path, Option(metavar="DIR")] = Path("results/eval")
    """A folder for run_meta.json and the records."""
    resume: Switch = False
    """Go on with what is there, or ask for more of the same model."""
    json: Switch = False
    """Print one JSON object with the scores, and nothing else, to stdout."""


@dataclass(frozen=True, kw_only=True)
class Arguments(TaskOptions, RuleOptions, MachineOptions, OutputOptions):
    command: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: evaluate(parse(Arguments, argv, __doc__, "eval.py")))


def evaluate(args: Arguments) -> None:
    """Ask everything. What is wrong by itself is found before the model is loaded, and what the prompts show
    before any is answered."""
    process = Process.here(args.tensor_parallel_size)
    rules = choose_rules(args.policies, args.compression, args.budget)
    with loading():  # of benchmarks, which need packages of their own
        names = registry.expand(args.tasks)
        check_tasks(args, names)
        check_budgets(rules, args.lengths)
        check_folder(args, process)
        essays = load_essays(args.essays) if registry.needing("essays", names) else None
    check_device(args.device)
    with (
        init_tensor_parallel(args.device, process.size) as (tp, device),
        program.silence(tp.rank > 0),
    ):
        for rule in rules:
            with naming(str(rule)):
                check_rule(rule.eviction, tp)
        args = dataclasses.replace(args, device=str(device))
        records, total = ask(args, Asked(process, rules, names, essays), tp)
        report(args, records, rules, total)


class Asked(NamedTuple):
    """What a command line comes to."""

    process: Process
    rules: list[Rule]
    names: list[str]
    essays: Essays | None


def ask(args: Arguments, asked: Asked, tp: TensorParallel) -> tuple[list[Record], int]:
    """Load the model, or this rank's part of it, and make the records that it should. Those that are there,
    and how many there will be."""
    process, rules, names, essays = asked
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        model, tokenizer = decode.load(args, tp)
        most = model.config.max_positions
        if args.lengths and max(args.lengths) > most:
            raise ValueError(f"--lengths {max(args.lengths)} is more than the model's {most} positions")
        template_args = prompts.parse_template_args(args.template_args)
        prompting = Prompting(tokenizer, args.template, template_args)
        setting = registry.Setting(prompting, most, args.seed, essays, args.data)
        with loading():
            tasks = registry.make_tasks(names, setting)
        groups = make_groups(tasks, args.lengths, args.samples)
        evaluation = Evaluation(
            model,
            prompting,
            rules,
            batch=process.batch(groups, args.batch),
            compile=args.compile,
            attention=args.attention,
            on_compile=lambda what: tqdm.write(f"compiling the {what} ...", file=sys.stderr),
        )
        about = {
            **meta.describe(args.command, config(args), evaluation, rules, groups, essays),
            "model": decode.describe(args, model),
            "ranks": process.ranks * process.size,
        }
        records = run(evaluation, groups, args.out, process, about, resume=args.resume)
    return records, count(groups, rules)


def check_tasks(args: TaskOptions, names: Sequence[str]) -> None:
    """Raise ValueError for options that are missing or would have no effect, and for missing packages."""
    made = registry.needing("lengths", names)
    if made and not args.lengths:
        raise ValueError(f"{made[0]} makes prompts of any length: give --lengths")
    for option in ("lengths", "essays", "data"):
        if getattr(args, option) and not registry.needing(option, names):
            raise ValueError(f"--{option} has no effect on {', '.join(names)}")
    if prompts.parse_template_args(args.template_args) and args.template == "none":
        raise ValueError("--template-args has no effect with --template none")
    if args.data is not None and not args.data.is_dir():
        raise ValueError(f"--data {args.data} is no folder")
    benchmarks = {name.partition(":")[0] for name in names}
    program.require(
        "eval",
        *(["wonderwords"] if "ruler" in benchmarks else []),
        *(["rouge"] if "longbench" in benchmarks else []),
        *(["datasets"] if benchmarks & {"longbench", "longbench-v2"} and args.data is None else []),
    )


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Say in a ValueError what it is of."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def check_budgets(rules: Sequence[Rule], lengths: Sequence[int]) -> None:
    """Raise ValueError for a rule that protects more than it keeps of prompts as long as they may be."""
    for rule, length in product(rules, lengths):
        if rule.eviction is not None:
            with naming(f"{rule}, --lengths {length}"):
                rule.eviction.budget_for(length)


def check_folder(args: OutputOptions, process: Process) -> None:
    """Raise ValueError for a folder with records of who knows what, or with results that nobody asked to go
    on with. What other processes write may be of this run, which they have begun sooner."""
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is no folder")
    found = {file.name for file in args.out.glob("records*.jsonl")}  # before what they never are without
    described = (args.out / NAME).exists()
    if found and not described:
        raise ValueError(f"{args.out} has records but no {NAME}, which says of what: give another --out")
    if not args.resume and (found - process.others or (described and process.ranks == 1)):
        raise ValueError(f"{args.out} has results of a run: go on with --resume, or give another --out")
    if described:
        read_meta(args.out)  # that it can be read


def config(args: Arguments) -> dict[str, Any]:
    """All options, by their names."""
    options = dataclasses.asdict(args)
    del options["command"]
    if not options["template_args"]:
        del options["template_args"]  # as in runs from before there were any
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


def report(args: OutputOptions, records: Sequence[Record], rules: Sequence[Rule], total: int) -> None:
    """What came of it, once all processes have done their share."""
    if len(records) == total:
        scores = means(records)
        if args.json:
            about = {"out": str(args.out), "records": total}
            print(json.dumps({**about, "scores": [dataclasses.asdict(score) for score in scores]}))
        else:
            print(summary(scores, list(map(str, rules))))
    say(f"{len(records):,} of {total:,} records are in {args.out}")


def summary(means: Sequence[Mean], rules: Sequence[str]) -> str:
    """A line for each rule, a column for each task; scores in percent."""
    columns: dict[str, dict[str, Mean]] = {}
    for mean in means:
        name = mean.task if mean.length is None else f"{mean.task} {mean.length:,}"
        columns.setdefault(name, {})[label(mean.policy, mean.compression, mean.budget)] = mean
    counts = (f"{next(iter(column.values())).n:,}" for column in columns.values())
    scores = ([rule, *(f"{100 * of[rule].score:.1f}" for of in columns.values())] for rule in rules)
    return "\n".join(aligned([["rule", *columns], ["samples", *counts], *scores]))


if __name__ == "__main__":
    sys.exit(main())
