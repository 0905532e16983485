"""What goes to stdout and stderr, in one order where a reader sees both in one place."""

from __future__ import annotations

import os
import shutil
import sys

_WIPE = "\r\x1b[K"


class Screen:
    """An answer on stdout, and lines about it on stderr, none of which splits a line of the answer."""

    def __init__(self) -> None:
        self._open = False  # the answer's last line has text, and no end yet
        self._passing = False  # a line is shown that goes away
        self._waiting: list[str] = []

    def write(self, text: str) -> None:
        """Text of an answer. What has waited for the end of a line comes behind it."""
        self.wipe()
        end = text.rfind("\n") + 1
        if end:
            self._put(text[:end])
            self._open = False
            waiting, self._waiting = self._waiting, []
            for line in waiting:
                self.say(line)
        if text[end:]:
            self._put(text[end:])
            self._open = True

    def say(self, text: str) -> None:
        """A line on stderr."""
        if self._open and _one_stream():
            self._waiting.append(text)
            return
        self.wipe()
        print(text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """A line on stderr that goes away before the next output, where there is a terminal."""
        if not sys.stderr.isatty() or (self._open and _one_stream()):
            self.say(text)
            return
        self.wipe()
        width = shutil.get_terminal_size().columns - 1
        print(text[:width], end="", file=sys.stderr, flush=True)
        self._passing = True

    def wipe(self) -> None:
        """Take away what goes away."""
        if self._passing:
            print(_WIPE, end="", file=sys.stderr, flush=True)
            self._passing = False

    def end_line(self) -> None:
        """End the answer's line where it was broken off."""
        self.wipe()
        if self._open:
            self.write("\n")

    @staticmethod
    def _put(text: str) -> None:
        print(text, end="", flush=True)


def _one_stream() -> bool:
    """Whether stdout and stderr end up in one place: a terminal, or a file that both are sent to."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        return True
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError, AttributeError):  # not a file of the system
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


SCREEN = Screen()
"""The one that the process has."""
