"""Nothing that is said splits a line of an answer."""

from __future__ import annotations

import io
import sys

import pytest

from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.screen import _WIPE, SCREEN, Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """As stdout and stderr."""
    both = Terminal()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    return both


def test_status_goes_away_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    screen = Screen()
    screen.status("draft 1")
    screen.status("draft 2")
    screen.write("The sea")
    screen.end_line()
    assert terminal.getvalue() == f"draft 1{_WIPE}draft 2{_WIPE}The sea\n"


def test_a_long_status_stays_within_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "20")
    Screen().status("x" * 50)
    assert terminal.getvalue() == "x" * 19


def test_what_is_said_waits_for_the_end_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    screen = Screen()
    screen.write("The sea")
    screen.say("WARNING: one")
    screen.write(" is")
    screen.status("compiling")
    screen.write(" salty.\nVery.")
    screen.say("WARNING: two")
    screen.end_line()
    assert terminal.getvalue() == "The sea is salty.\nWARNING: one\ncompiling\nVery.\nWARNING: two\n"


def test_two_streams_need_no_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.write("The sea")
    screen.say("one")
    screen.status("two")
    screen.write(" is salty.\n")
    assert capsys.readouterr() == ("The sea is salty.\n", "one\ntwo\n")


def test_an_error_in_the_middle_of_an_answer_has_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)

    def fail() -> None:
        SCREEN.write("The sea")
        raise ValueError("no more")

    assert program.run(fail) == 2
    assert terminal.getvalue() == "The sea\nerror: no more\n"
