"""Ask a model something while its KV cache keeps a fraction of the prompt.

Examples:
  python scripts/decode.py --prompt "Why is the sea salty?" --budget 256
  python scripts/decode.py --prompt-file book.txt --policy lazy4 --compression 0.95
  cat report.txt question.txt | python scripts/decode.py - --budget 512 --compare full
  python scripts/decode.py --prompts-jsonl questions.jsonl --json > answers.json

Processes that torchrun starts hold the model together. Answers go to stdout, progress and a closing
summary to stderr. The exit code is 0, or 2 where the command line or a file is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv import POLICIES, Decoder, EvictionConfig, Sampling, StopStrings, policy
from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.config import SMALLEST_BUFFER
from inertiakv.decoding.tensor_parallel import check_rule
from inertiakv.models import load_model
from inertiakv.models.files import check_text, read_text
from inertiakv.models.parallel import init_tensor_parallel
from inertiakv.scoring.learned import check_file
from inertiakv.scripts.cli import program, prompts
from inertiakv.scripts.cli.advice import WHICH_POLICY
from inertiakv.scripts.cli.arguments import FieldsOf, Option, Switch, parse
from inertiakv.scripts.cli.batches import Answerer, Part
from inertiakv.scripts.cli.console import Detokenizer, tell_compile, tell_draft
from inertiakv.scripts.cli.kept import KeptTokens, in_colour
from inertiakv.scripts.cli.machine import ModelOptions, check_device, loading
from inertiakv.scripts.cli.program import say
from inertiakv.scripts.cli.report import Run, agreement, summary, too_few
from inertiakv.scripts.cli.screen import SCREEN

DEFAULT_NEW_TOKENS = 256
DEFAULT_BATCH_SIZE = 8
BOTH_POLICIES = ("compression", "budget", "min_budget", "sinks", "recent")
"""Eviction options that hold for the compared policy, too: how much is kept. The rest is a policy's own."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Exactly one of -, --prompt, --prompt-file and --prompts-jsonl."""

    stdin: Annotated[str | None, Option(metavar="-", positional=True)] = None
    """A lone dash: the prompt comes from stdin."""
    prompt: str | None = None
    """The prompt itself."""
    prompt_file: Path | None = None
    """A text file; the newline at its end is not part of the prompt."""
    prompts_jsonl: Path | None = None
    """Several prompts: {"prompt": TEXT} or {"messages": [...]} in each line, and an "id" that comes back."""
    system: str | None = None
    """A system message before each prompt."""
    template_args: prompts.TemplateArgs = ()
    """What the chat template is given beside the messages, as enable_thinking=false. Those of a line of
    --prompts-jsonl, its "template_args", come first."""
    raw: Switch = False
    """Give the model the text as it is, without the chat template."""


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """By which rule tokens are evicted."""

    policy: Annotated[str, Option("NAME", choices=tuple(POLICIES))] = "inertiakv"
    """A named rule; full keeps every token."""
    eviction: Annotated[
        dict[str, Any],
        FieldsOf(
            EvictionConfig,
            "Fields of the policy to set to other values than its own. Without --budget and --min-budget the "
            f"latter is {SMALLEST_BUFFER}, which costs no memory.",
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(RuleOptions):
    """By which rule tokens are evicted."""

    compare: Annotated[str | None, Option("NAME", choices=tuple(POLICIES))] = None
    """A second policy to answer the same prompts afterwards. --compression, --budget, --min-budget, --sinks
    and --recent hold for both policies, the other eviction options for --policy alone."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """How long an answer is, and how its tokens are chosen."""

    max_new_tokens: Annotated[int | None, Option(default=str(DEFAULT_NEW_TOKENS), least=1)] = None
    """Tokens of an answer at most."""
    sampling: Annotated[
        dict[str, Any],
        FieldsOf(Sampling, "How tokens are chosen. The filters apply in this order, after the temperature."),
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(TokenOptions):
    """Where an answer ends, and how its tokens are chosen."""

    stop: Annotated[tuple[str, ...], Option(repeat=True)] = ()
    """End an answer before this text. May be given several times."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions(ModelOptions):
    """What computes, and how."""

    quantize: Literal["int8"] | None = None
    """Weights of linear layers as int8, half of bfloat16's bytes. Needs torchao."""
    attention: Literal["auto", "dense", "flex"] = "auto"
    """auto: the faster one on the device."""
    compile: Annotated[bool | None, Option(default="where there is a C++ compiler")] = None
    """Run the decode step as a compiled graph, which pays off from some hundred tokens on."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How many prompts are answered together."""

    batch_size: Annotated[int | None, Option(default=str(DEFAULT_BATCH_SIZE), least=1)] = None
    """Prompts of --prompts-jsonl at most, of similar lengths. More are faster together, and take more
    memory."""


@dataclass(frozen=True, kw_only=True)
class DebuggingOptions:
    """For a model on several devices, with torchrun."""

    check_ranks: Switch = False
    """See at every step that all processes agree."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is printed. Answers to several prompts come batch by batch, under their ids or numbers."""

    stream: Annotated[bool | None, Option(default="for a single prompt")] = None
    """Print an answer as it comes."""
    json: Switch = False
    """Print one JSON object with the answers and every number, and nothing else, to stdout."""
    show_kept: Switch = False
    """Afterwards print the prompt with what was kept of it to stderr; with --json: the kept positions."""
    jsonl: Switch = False
    """With --prompts-jsonl: print a JSON object a line for each answer, once its batch is done."""


@dataclass(frozen=True, kw_only=True)
class Arguments(
    PromptOptions,
    PolicyOptions,
    AnswerOptions,
    BatchOptions,
    MachineOptions,
    DebuggingOptions,
    OutputOptions,
): ...


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: decode(parse(Arguments, argv, __doc__, epilog=WHICH_POLICY)))


def decode(args: Arguments) -> None:
    """Answer the prompts, alone or together with the other processes of torchrun, of which one speaks."""
    check_device(args.device)
    with init_tensor_parallel(args.device) as (tp, device), program.silence(tp.rank > 0):
        answer_prompts(dataclasses.replace(args, device=str(device)), tp)


def answer_prompts(args: Arguments, tp: TensorParallel) -> None:
    """Answer the prompts with each policy. Mistakes in the options are found before the model is loaded."""
    policies = choose_policies(args)
    for _, eviction in policies:
        check_rule(eviction, tp)
        if eviction is not None and eviction.scorer_file is not None:
            check_file(eviction.scorer_file)
    if args.show_kept and all(eviction is None for _, eviction in policies):
        raise ValueError("--show-kept has no effect with policy 'full', which keeps every token")
    sampling = Sampling(**args.sampling)
    if tp.size > 1 and args.stdin is not None:
        raise ValueError(f"{tp.size} processes cannot all read a prompt from stdin: give --prompt-file FILE")
    given = read_prompts(args)
    streaming = choose_streaming(args, len(given))
    if "" in args.stop:
        raise ValueError("--stop needs a text that is not empty")
    check_text("".join(args.stop), "--stop")

    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        start = time.perf_counter()
        model, tokenizer = load(args, tp)
        seconds = time.perf_counter() - start
        rows = encode(tokenizer, given, args)
    lengths = list(map(len, rows))
    max_new_tokens = choose_length(args.max_new_tokens, max(lengths), model.config.max_positions)
    for name, eviction in policies:
        if remark := too_few(eviction, lengths):
            say(f"WARNING: {name}: {remark}")
    stop = StopStrings(tokenizer, args.stop) if args.stop else None
    detokenizer = Detokenizer(tokenizer, model.config.eos_token_ids, stop)
    decoders = [make_decoder(model, eviction, args) for _, eviction in policies]
    answerer = Answerer(
        decoders, choose_reader(decoders, args), detokenizer, max_new_tokens, sampling, streaming
    )
    ids = [number if prompt.id is None else prompt.id for number, prompt in enumerate(given, 1)]
    kept = [KeptTokens(name, rows) for name, _ in policies] if args.show_kept else None
    about = {
        **describe(args, model),
        "substituted": model.substituted,
        "eos_token_ids": list(model.config.eos_token_ids),
        "device": str(model.device),
        "ranks": tp.size,
    }

    def make_run(number: int, part: Part) -> Run:
        places, out = part
        texts = list(map(detokenizer.text, out.tokens))
        positions = None if kept is None else [kept[number].positions[place] for place in places]
        called = [ids[place] for place in places]
        return Run(about, *policies[number], out, texts, seconds, called, positions)

    def begin(number: int) -> None:
        if len(policies) > 1 and not args.json and not args.jsonl:
            SCREEN.write(f"=== {policies[number][0]} ===\n")

    def done(number: int, part: Part) -> None:
        if kept is not None:
            kept[number].take(decoders[number], part[0])
        if not streaming:
            show(args, make_run(number, part), several=len(rows) > 1)

    wholes = answerer.answer_all(rows, args.batch_size or DEFAULT_BATCH_SIZE, begin, done)
    runs = [make_run(number, (list(range(len(rows))), whole)) for number, whole in enumerate(wholes)]
    if args.json:
        print(json.dumps(as_json(runs, named=any(prompt.id is not None for prompt in given))))
    elif kept is not None:
        evicting = [each for each, (_, eviction) in zip(kept, policies, strict=True) if eviction is not None]
        say("\n" + "\n\n".join(each.text(tokenizer, in_colour(sys.stderr)) for each in evicting))
    say("\n" + summary(runs))


def make_decoder(model: Any, eviction: EvictionConfig | None, args: Arguments) -> Decoder:
    """A decoder that tells of its slow parts."""
    return Decoder(
        model,
        eviction,
        compile=args.compile,
        attention=args.attention,
        on_compile=tell_compile,
        on_draft=tell_draft,
        check_ranks=args.check_ranks,
    )


def choose_reader(decoders: Sequence[Decoder], args: Arguments) -> Decoder | None:
    """What reads prompts once for several decoders: the last one, if it keeps everything."""
    if len(decoders) == 1:
        return None
    return decoders[-1] if decoders[-1].eviction is None else make_decoder(decoders[-1].model, None, args)


def choose_policies(args: PolicyOptions) -> list[tuple[str, EvictionConfig | None]]:
    """Names and configs of the policies to run. Raises ValueError for options that none of them would use."""
    given = args.eviction
    if args.compare is None:
        return [(args.policy, floored_policy(args.policy, given))]
    shared = shared_by_policies(given)
    if args.policy == "full":  # has no use for what the other one keeps
        given = {name: value for name, value in given.items() if name not in shared}
    first = floored_policy(args.policy, given)
    second = floored_policy(args.compare, {} if args.compare == "full" else shared)
    if first == second:
        raise ValueError(f"--compare {args.compare} would run the same policy twice")
    return [(args.policy, first), (args.compare, second)]


def shared_by_policies(given: dict[str, Any]) -> dict[str, Any]:
    """What is given of how much is kept."""
    return {name: value for name, value in given.items() if name in BOTH_POLICIES}


def floored_policy(name: str, changes: dict[str, Any]) -> EvictionConfig | None:
    """The named policy with fields replaced. Unless it is said how many tokens are kept at least, of a short
    prompt it keeps what the smallest cache has room for anyway."""
    config = policy(name, **changes)
    if config is None or config.budget is not None or config.protect_prompt or "min_budget" in changes:
        return config
    return replace(config, min_budget=SMALLEST_BUFFER)


def read_prompts(args: PromptOptions) -> list[prompts.Prompt]:
    """The prompts, from the one place that was given. Raises ValueError for none, or more than one."""
    if args.stdin not in (None, "-"):
        quoted = shlex.quote(args.stdin or "")
        raise ValueError(f"unexpected {args.stdin!r}: did you mean --prompt {quoted}?")
    ways = {
        "-": args.stdin,
        "--prompt": args.prompt,
        "--prompt-file": args.prompt_file,
        "--prompts-jsonl": args.prompts_jsonl,
    }
    used = [name for name, value in ways.items() if value is not None]
    if not used:
        raise ValueError(
            "no prompt: give --prompt TEXT, --prompt-file FILE, --prompts-jsonl FILE, or - for stdin"
        )
    if len(used) > 1:
        raise ValueError(f"one prompt source at a time, got {' and '.join(used)}")
    if args.raw and args.system is not None:
        raise ValueError("--system has no effect with --raw, which leaves out the chat template")
    if args.raw and args.template_args:
        raise ValueError("--template-args has no effect with --raw, which leaves out the chat template")
    if args.system is not None:
        check_text(args.system, "--system")
    common = prompts.parse_template_args(args.template_args)
    return [replace(p, template_args={**common, **p.template_args}) for p in _read_prompts(args)]


def _read_prompts(args: PromptOptions) -> list[prompts.Prompt]:
    if args.prompts_jsonl is not None:
        return prompts.from_jsonl(args.prompts_jsonl)
    if args.prompt_file is not None:
        return [prompts.from_text(read_text(args.prompt_file), str(args.prompt_file))]
    if args.prompt is not None:
        return [prompts.from_text(args.prompt, "--prompt")]
    return [prompts.from_stdin()]


def choose_streaming(args: Arguments, count: int) -> bool:
    """Whether the answer is printed as it comes. Raises ValueError where an option would be ignored."""
    if args.stream and (args.json or args.jsonl):
        raise ValueError(f"--stream has no effect with --json{'l' * args.jsonl}, which prints whole answers")
    if args.json and args.jsonl:
        raise ValueError("give --json for one object at the end, or --jsonl for one a line, not both")
    if args.prompts_jsonl is None:
        for name, given in (("--jsonl", args.jsonl), ("--batch-size", args.batch_size is not None)):
            if given:
                raise ValueError(f"{name} has no effect without --prompts-jsonl")
    if args.stream and count > 1:
        raise ValueError(f"--stream takes one prompt, got {count}: their answers are printed at the end")
    return count == 1 and not args.json and not args.jsonl and args.stream is not False


def load(args: MachineOptions, tp: TensorParallel = SINGLE_PROCESS) -> tuple[Any, Any]:
    """Model and tokenizer. Raises ValueError if it cannot be loaded."""
    if args.quantize is not None:
        program.require("quant", "torchao")
    say(f"loading {args.model} ...")
    with loading():
        return load_model(args.model, dtype=args.dtype, device=args.device, quantize=args.quantize, tp=tp)


def describe(args: MachineOptions, model: Any) -> dict[str, Any]:
    """The model, for JSON."""
    return {
        "name": args.model,
        "source": str(model.source),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantize": args.quantize,
    }


def encode(tokenizer: Any, given: Sequence[prompts.Prompt], args: PromptOptions) -> list[list[int]]:
    return [prompts.encode(tokenizer, prompt, raw=args.raw, system=args.system) for prompt in given]


def choose_length(asked: int | None, prompt_tokens: int, max_positions: int) -> int:
    """Tokens of an answer at most; the default makes do with what the model's positions leave."""
    if asked is not None:
        return asked
    room = max_positions - prompt_tokens
    if not 0 < room < DEFAULT_NEW_TOKENS:
        return DEFAULT_NEW_TOKENS
    say(f"answers end after {room} tokens at most: the model has {max_positions:,} positions")
    return room


def show(args: OutputOptions, run: Run, *, several: bool) -> None:
    """Print the answers of a batch, unless they come at the end."""
    if args.jsonl:
        for name, row in run.named_rows:
            SCREEN.write(json.dumps({"id": name, "policy": run.policy, **row}) + "\n")
    elif not args.json:
        for name, text in zip(run.ids, run.texts, strict=True):
            SCREEN.write(f"--- {name} ---\n{text}\n" if several else f"{text}\n")


def as_json(runs: Sequence[Run], named: bool) -> dict[str, Any]:
    """Rows have an id where prompts are `named`."""
    report = runs[0].as_json(named)
    if len(runs) == 2:
        report |= {"compared": runs[1].as_json(named), "agreement": round(agreement(*runs), 4)}
    return report


if __name__ == "__main__":
    sys.exit(main())
