"""Chat with a model in the terminal, while its KV cache keeps a fraction of what was read.

Examples:
  python scripts/chat.py
  python scripts/chat.py --file report.txt --budget 512
  python scripts/chat.py --model Qwen/Qwen2.5-7B-Instruct --system "Answer in one sentence." --policy lazy4

While you chat:
{commands}

Ctrl-C ends an answer, of which the text so far is kept; before there is any text it drops the message.
Without a terminal each line of stdin is a message. Answers go to stdout, everything else to stderr. The exit
code is 0, or 2 where the command line or a file is wrong.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv import POLICIES, EvictionConfig, Sampling, Stats
from inertiakv.compiling.collectives import SINGLE_PROCESS
from inertiakv.decoding.tensor_parallel import check_rule
from inertiakv.evals.reporting.table import aligned
from inertiakv.models import Chat
from inertiakv.models.encoding import check_template_args
from inertiakv.models.files import check_text, read_text
from inertiakv.scoring.learned import check_file
from inertiakv.scripts import decode
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Option, parse
from inertiakv.scripts.cli.console import PrefillBar, tell_compile, tell_draft
from inertiakv.scripts.cli.machine import check_device
from inertiakv.scripts.cli.program import say
from inertiakv.scripts.cli.report import stats_lines
from inertiakv.scripts.cli.screen import SCREEN

COMMANDS = {
    "/help": "this list",
    "/policy NAME": "go by another rule",
    "/budget N": "keep N tokens",
    "/compression X": "evict this share of what is read, as 0.9",
    "/file F": "put a document before the next message",
    "/reread": "read everything anew with the next message: what was evicted is there again",
    "/clear": "forget all messages, and documents",
    "/stats": "what the cache holds, and what took how long",
    "/quit": "leave, as the end of input does",
}
HELP = "\n".join(f"  {command:<16}{text}" for command, text in COMMANDS.items())


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What goes before the first message."""

    system: str | None = None
    """A message that says how to answer."""
    file: Annotated[tuple[Path, ...], Option(repeat=True)] = ()
    """A text file before the first message. May be given several times."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(decode.RuleOptions):
    """By which rule tokens are evicted."""

    policy: Annotated[str, Option("NAME", choices=tuple(POLICIES))] = "rehearsed"


@dataclass(frozen=True, kw_only=True)
class Arguments(ChatOptions, PolicyOptions, decode.TokenOptions, decode.MachineOptions): ...


def main(argv: Sequence[str] | None = None) -> int:
    description = (__doc__ or "").replace("{commands}", HELP)
    return program.run(lambda: chat(parse(Arguments, argv, description)))


def chat(args: Arguments) -> None:
    """Answer messages up to the end of input. Mistakes in the options are found before the model is
    loaded."""
    rule = Rule(args.policy, args.eviction)
    check_rule(rule.config, SINGLE_PROCESS)
    if rule.config is not None and rule.config.scorer_file is not None:
        check_file(rule.config.scorer_file)
    sampling, length = Sampling(**args.sampling), args.max_new_tokens or decode.DEFAULT_NEW_TOKENS
    if args.system is not None:
        check_text(args.system, "--system")
    documents = list(map(read_document, args.file))
    check_device(args.device)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        model, tokenizer = decode.load(args)
    check_template_args(tokenizer, {})
    talk = Chat(
        model,
        tokenizer,
        rule.config,
        system=args.system,
        compile=args.compile,
        attention=args.attention,
        on_compile=tell_compile,
        on_draft=tell_draft,
    )
    if sys.stdin.isatty():
        say(f"{rule}. /help lists what can be changed; /quit or Ctrl-D leaves.")
    session = Session(talk, rule, documents, length, sampling)
    for line in read_lines():
        if not session.take(line):
            return


def read_document(path: Path | str) -> str:
    text = read_text(Path(path).expanduser()).strip("\n")
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def read_lines() -> Iterator[str]:
    """Messages and commands, up to the end of input."""
    if hasattr(sys.stdin, "reconfigure"):  # bytes that are no text are found in the line that has them
        sys.stdin.reconfigure(errors="surrogateescape")
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (what `input` edits a line with)
    while True:
        try:
            if on_terminal and sys.stdout.isatty():
                yield input("> ")
            elif line := sys.stdin.readline():
                yield line
            else:
                return
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            say("\n/quit or Ctrl-D leaves")


@dataclass(frozen=True)
class Rule:
    """A named policy, and fields that are set to other values than its own."""

    name: str
    changes: dict[str, Any]

    @property
    def config(self) -> EvictionConfig | None:
        return decode.floored_policy(self.name, self.changes)

    def named(self, name: str) -> Rule:
        """Another policy that keeps as much."""
        shared = {} if name == "full" else decode.shared_by_policies(self.changes)
        return Rule(name, shared)

    def keeping(self, **amount: float) -> Rule:
        others = ("compression", "budget", "min_budget")
        return Rule(self.name, {k: v for k, v in self.changes.items() if k not in others} | amount)

    def __str__(self) -> str:
        config = self.config
        if config is None:
            return "full keeps every token"
        if config.budget is not None:
            return f"{self.name} keeps {config.budget:,} tokens"
        return (
            f"{self.name} evicts {config.compression:.0%} of what is read, down to {config.min_budget} tokens"
        )


class Interrupt:
    """Ctrl-C while a message is answered. Before there is text it breaks everything off at once; later it is
    `asked` for, and the answer ends after the next piece of text."""

    def __init__(self) -> None:
        self.has_text = self.asked = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, _: int, __: FrameType | None) -> None:
        if self.asked or not self.has_text:
            raise KeyboardInterrupt
        self.asked = True


class Session:
    """A chat in the terminal: messages and commands, line by line."""

    def __init__(
        self, talk: Chat, rule: Rule, documents: list[str], max_new_tokens: int, sampling: Sampling
    ) -> None:
        self.talk, self.rule, self.documents = talk, rule, documents
        self.max_new_tokens, self.sampling = max_new_tokens, sampling

    def take(self, line: str) -> bool:
        """Do what a line says. Returns whether the chat goes on. What is wrong is said in one line."""
        line = line.removeprefix("\ufeff").strip()
        try:
            check_text(line, "the message")
            if line.startswith("/"):
                return self._command(*line.split(None, 1))
            if line:
                self._answer(line)
        except (ValueError, OSError, MemoryError) as error:
            SCREEN.end_line()
            say(f"error: {program.one_line(error)}")
        return True

    def _answer(self, message: str) -> None:
        """Answer a message, with the documents before it."""
        talk, before = self.talk, len(self.talk.messages)
        text, settings = "\n\n".join([*self.documents, message]), {"sampling": self.sampling}
        with Interrupt() as interrupt, contextlib.closing(PrefillBar()) as bar:
            pieces = talk.stream(text, self.max_new_tokens, progress=bar, **settings)
            with contextlib.suppress(KeyboardInterrupt), contextlib.closing(pieces):
                self._print(pieces, interrupt)
        SCREEN.end_line()
        if len(talk.messages) == before:
            say("the message was dropped")
            return
        self.documents = []
        line = held(talk.decoder.stats)
        say(f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() else line)

    @staticmethod
    def _print(pieces: Iterator[str], interrupt: Interrupt) -> None:
        """The first piece waits for the second: between them drafts are decoded and steps compiled."""
        waiting = next(pieces, "")
        for piece in pieces:
            SCREEN.write(waiting + piece)
            waiting, interrupt.has_text = "", True
            if interrupt.asked:
                return
        SCREEN.write(waiting or ("" if interrupt.has_text else "\n"))

    # Commands.

    def _command(self, name: str, value: str = "") -> bool:
        if name == "/quit" and not value:
            return False
        takes = {command.partition(" ")[0]: command.partition(" ")[2] for command in COMMANDS}
        if name not in takes:
            say(f"no command {name}; there are\n{HELP}")
        elif bool(takes[name]) != bool(value):
            raise ValueError(f"{name} takes {takes[name] or 'nothing'}")
        else:
            action: Callable[..., None] = getattr(self, name[1:])
            action(*[value] if value else [])
        return True

    def help(self) -> None:
        say(HELP)

    def policy(self, name: str) -> None:
        self._use(self.rule.named(name))

    def budget(self, tokens: str) -> None:
        self._use(self.rule.keeping(budget=_number(int, tokens, "/budget takes a number of tokens")))

    def compression(self, share: str) -> None:
        self._use(self.rule.keeping(compression=_number(float, share, "/compression takes a share, as 0.9")))

    def _use(self, rule: Rule) -> None:
        self.talk.use(rule.config)
        self.rule = rule
        say(f"{rule}; the next message is read together with all before it")

    def file(self, path: str) -> None:
        """A share of what is read is one of the document, too, where everything is read together."""
        self.documents.append(read_document(path))
        if self.rule.config is not None and self.rule.config.budget is None:
            self.talk.reread()
        say(f"{path} goes before the next message")

    def reread(self) -> None:
        self.talk.reread()
        say("the next message is read together with all before it")

    def clear(self) -> None:
        self.talk.clear()
        self.documents = []
        say("everything is forgotten")

    def stats(self) -> None:
        stats = self.talk.decoder.stats
        lines = {"policy": self.rule.name, "messages": str(len(self.talk.messages))}
        lines |= stats_lines(stats) if stats.batch else {}
        say("\n".join(aligned(list(map(list, lines.items())))))


def held(stats: Stats) -> str:
    """What the cache holds, in a line."""
    kept, tokens = sum(stats.kept_tokens), sum(stats.sequence_tokens)
    line = f"{kept:,.0f} of {tokens:,} tokens kept, "
    line += f"{stats.cache_bytes / 1e6:,.1f} MB instead of {stats.full_cache_bytes / 1e6:,.1f} MB"
    rate = stats.tokens_per_second
    return line if rate is None else f"{line}, {rate:.1f} tokens/s"


def _number(kind: Callable[[str], float], text: str, problem: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{problem}, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
