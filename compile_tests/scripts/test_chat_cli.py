"""scripts/chat.py on a tiny random model: messages, commands, Ctrl-C."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_tests.tiny_chat import tiny_chat
from inertiakv import EvictionConfig, policy
from inertiakv.models import Chat, load_model
from inertiakv.models import chat as chat_module
from inertiakv.scripts import chat
from inertiakv.scripts.cli.console import PrefillBar
from inertiakv.scripts.cli.screen import SCREEN

TEXT = "The keeper counts the ships that pass, and writes down every one of them. " * 6
FLOORED = policy("rehearsed", min_budget=127)


class Talk:
    """A chat that is run with lines of input. `chats`: those that it has made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        self.chats: list[Chat] = []
        made = self.chats

        class Kept(Chat):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                made.append(self)

        monkeypatch.setattr(chat, "Chat", Kept)

    def __call__(self, *lines: str, argv: tuple[object, ...] = (), code: int = 0) -> tuple[str, list[str]]:
        """What is printed to stdout, and the lines of stderr behind those of loading."""
        self.monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        options = ["--model", str(self.folder), "--no-compile", "--max-new-tokens", "8", *map(str, argv)]
        self.capsys.readouterr()
        assert chat.main(options) == code
        out, err = self.capsys.readouterr()
        return out, [line for line in err.splitlines() if "draft" not in line][2 if self.chats else 0 :]

    @property
    def contents(self) -> list[str]:
        """Of the user's messages."""
        return [m["content"] for m in self.chats[-1].messages if m["role"] == "user"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat(tmp_path_factory.mktemp("model"))


@pytest.fixture
def talk(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    return Talk(folder, monkeypatch, capsys)


def answers(folder: Path, *messages: str, rule: EvictionConfig | None = FLOORED, **options: Any) -> str:
    same = Chat(*load_model(folder), rule, compile=False, **options)
    return "".join(f"{same.say(message, 8)}\n" for message in messages)


def test_each_line_is_a_message(talk: Talk, folder: Path) -> None:
    out, err = talk(f"\ufeff{TEXT}", "", "And then?", argv=("--system", "Be brief."))
    assert out == answers(folder, TEXT.strip(), "And then?", system="Be brief.")
    first, second = err
    length = len(f"[system]Be brief.[user]{TEXT.strip()}[assistant]") + 3 + 7
    assert first.startswith(f"127 of {length} tokens kept, ")
    assert " MB instead of " in first
    assert first.endswith(" tokens/s")
    assert second.startswith("127 of ")
    assert talk.chats[-1].decoder.eviction == FLOORED


def test_documents_go_before_a_message(talk: Talk, folder: Path, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(f"{name}: {TEXT[:80]}\n")
    files = ("--file", tmp_path / "a", "--file", tmp_path / "b")
    out, err = talk("Who?", f"/file {tmp_path / 'c'}", "And why?", "So?", argv=files)
    a, b, c = ((tmp_path / name).read_text().strip("\n") for name in "abc")
    assert talk.contents == [f"{a}\n\n{b}\n\nWho?", f"{c}\n\nAnd why?", "So?"]
    assert err[1] == f"{tmp_path / 'c'} goes before the next message"
    # A share of the whole is kept, so all is read again with the document.
    same = Chat(*load_model(folder), FLOORED, compile=False)
    expected = [same.say(talk.contents[0], 8)]
    same.reread()
    expected += [same.say(text, 8) for text in talk.contents[1:]]
    assert out == "".join(f"{text}\n" for text in expected)


def test_rules_are_changed_while_chatting(talk: Talk) -> None:
    out, err = talk(
        TEXT,
        "/policy lazy4",
        "/budget 50",
        "Why?",
        "/compression 0.5",
        "/policy full",
        "And?",
        "/stats",
        "/reread",
        "/quit",
        "never read",
        argv=("--sinks", 2, "--alpha", 0.5),
    )
    assert out.count("\n") == 3
    assert (
        err[1] == "lazy4 evicts 90% of what is read, down to 127 tokens; the next message is read together "
        "with all before it"
    )
    assert err[2].startswith("lazy4 keeps 50 tokens;")
    assert err[3].startswith("50 of ")
    assert err[4].startswith("lazy4 evicts 50% of what is read, down to 127 tokens;")
    assert err[5].startswith("full keeps every token;")
    stats = dict(line.split(None, 1) for line in err[7:] if "  " in line)
    assert stats["policy"] == "full"
    assert stats["messages"] == "6"
    assert err[-1].startswith("the next message is read together")
    assert len(talk.contents) == 3


def test_clear_forgets_documents_too(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    talk("Hello", "/clear", "Who?", argv=("--file", tmp_path / "a"))
    assert talk.contents == ["Who?"]
    talk("/clear", "Who?", argv=("--file", tmp_path / "a"))
    assert talk.contents == ["Who?"]


@pytest.mark.parametrize(
    "line, problem",
    [
        ("/budget", "error: /budget takes N"),
        ("/quit now", "error: /quit takes nothing"),
        ("/budget many", "error: /budget takes a number of tokens, got 'many'"),
        ("/budget 0", "error: budget must be a whole number of at least 1, got 0"),
        ("/compression 2", "error: compression must be a number in [0, 1), got 2.0"),
        ("/compression x", "error: /compression takes a share, as 0.9, got 'x'"),
        ("/policy best", "error: unknown policy 'best'; choose from full"),
        ("/file nowhere", "error: nowhere: No such file or directory"),
        ("caf\udce9", "error: the message is not UTF-8 text"),
        ("x" * 5000, "error: the chat comes to"),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(line: str, problem: str, talk: Talk) -> None:
    out, (first, second) = talk(line, "Hello")
    assert first.startswith(problem)
    assert second.startswith("3")  # tokens kept
    assert out.count("\n") == 1
    assert talk.chats[-1].decoder.eviction == FLOORED


def test_an_unknown_command_is_answered_with_the_list(talk: Talk) -> None:
    _, err = talk("/unknown 5", "/help")
    assert err == ["no command /unknown; there are", *chat.HELP.splitlines(), *chat.HELP.splitlines()]


@pytest.mark.parametrize(
    "argv, problem",
    [
        (("--policy", "full", "--budget", 9), "budget has no effect with policy 'full'"),
        (("--file", "nowhere"), "nowhere: No such file or directory"),
        (("--max-new-tokens", 0), "argument --max-new-tokens: must be at least 1, got 0"),
        (("--system", "\udce9"), "--system is not UTF-8 text"),
    ],
)
def test_wrong_command_lines(
    argv: tuple[object, ...], problem: str, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat.decode, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    out, (line,) = talk("Hello", argv=argv, code=2)
    assert out == ""
    assert line.startswith(f"error: {problem}")


# Ctrl-C
# ----------------------------------------------------------------------------------------------------------


def press(when: Callable[[], bool]) -> None:
    if when():
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_answering_keeps_what_there_is(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pieces = SCREEN.write, []

    def press_at_third(text: str) -> None:
        write(text)
        pieces.append(text)
        press(lambda: len(pieces) == 3)

    monkeypatch.setattr(SCREEN, "write", press_at_third)
    out, err = talk(TEXT, "/stats", argv=("--max-new-tokens", 60))
    assert err[0].startswith("127 of ")
    (_, answer) = talk.chats[-1].messages
    assert out.strip("\n") == answer["content"].strip("\n")
    assert 0 < len(answer["content"]) < 30
    monkeypatch.undo()


def test_ctrl_c_while_reading_drops_the_message(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def press_at_first(self: PrefillBar, done: int, total: int) -> None:
        calls.append(done)
        press(lambda: len(calls) == 1)

    monkeypatch.setattr(PrefillBar, "__call__", press_at_first)
    out, err = talk("Hello", "Again")
    assert err[0] == "the message was dropped"
    assert len(err) == 2
    assert talk.contents == ["Again"]
    assert out.count("\n") == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_breaks_off(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    push = chat_module.TextStream.push
    calls: list[int] = []

    def press_twice(self: Any, token: int) -> str:
        calls.append(token)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return push(self, token)

    monkeypatch.setattr(chat_module.TextStream, "push", press_twice)
    _, err = talk("Hello", "Again")
    assert len(err) == 2
    assert len(talk.contents) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where a message is typed says how to leave; Ctrl-D leaves."""
    typed: Iterator[str | type[BaseException]] = iter(["Hello", KeyboardInterrupt, "Again", EOFError])
    prompts: list[str] = []

    def type_line(prompt: str) -> str:
        prompts.append(prompt)
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(io, "StringIO", Terminal)  # stdin
    both = Terminal()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    talk()
    printed = both.getvalue()
    assert prompts == ["> "] * 4
    assert "rehearsed evicts 90% of what is read, down to 127 tokens. /help lists" in printed
    assert printed.count("\x1b[2m") == 2  # dim
    assert "\n/quit or Ctrl-D leaves\n" in printed
    assert talk.contents == ["Hello", "Again"]
