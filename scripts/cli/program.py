"""A script as a program: exit codes, error messages, and which process of torchrun prints them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch

from inertiakv.scripts.cli.screen import SCREEN

_STORE_TIMEOUT = timedelta(seconds=10)
_TALKATIVE = ("torchao", "torch.utils._pytree", "transformers")
"""Loggers of libraries whose warnings are about GPU kernels and coming versions."""


def run(main: Callable[[], None]) -> int:
    """Call `main` and return the exit code of the process: 2, with one line on stderr, for a user's mistake.
    Under torchrun, of processes with the same message only the first prints it."""
    try:
        with others_are_quiet(), warnings_shown(), _whole_lines():
            main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` say, has gone; nor must the interpreter's own flush complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        line = one_line(error)
        if _is_first(line, lost_peer=isinstance(error, ConnectionError)):
            print(f"error: {line}", file=sys.stderr, flush=True)
        return 2
    return 0


def say(text: str) -> None:
    """Print a line to stderr."""
    SCREEN.say(text)


@contextlib.contextmanager
def _whole_lines() -> Iterator[None]:
    """However it ends, what is printed next begins a line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except BaseException:
        SCREEN.end_line()
        raise
    SCREEN.end_line()


class _Stderr(logging.Handler):
    """Prints to what is stderr at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname}: {record.getMessage()}")


@contextlib.contextmanager
def others_are_quiet() -> Iterator[None]:
    """Leave out what other libraries say to their programmers: it means nothing to a user, who sees what the
    project says, and every error. `-W` and PYTHONWARNINGS bring warnings back."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            if not sys.warnoptions:
                warnings.filterwarnings("ignore", category=category, module=r"(?!inertiakv\b)")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Print what the project warns of to stderr."""
    handler, log = _Stderr(logging.WARNING), logging.getLogger("inertiakv")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def require(extra: str, *packages: str) -> None:
    """Raise ValueError for packages of an extra that are not installed."""
    from inertiakv.models.extras import install, missing

    if lacking := missing(*packages):
        raise ValueError(f"this needs {lacking}: {install(extra)}")


@contextlib.contextmanager
def silence(wanted: bool) -> Iterator[None]:
    """Print nothing, if `wanted`."""
    if not wanted:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def one_line(error: BaseException) -> str:
    """What an error says."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or "out of memory"


def _is_first(line: str, *, lost_peer: bool) -> bool:
    """Whether no other process of torchrun has printed this line. A process that only lost its peer prints
    nothing once any other has printed an error, which is the cause. torchrun's own store counts the lines: it
    outlives the processes."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import TCPStore

    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, timeout=_STORE_TIMEOUT, wait_for_workers=False)
        attempt = "said {TORCHELASTIC_RUN_ID} {TORCHELASTIC_RESTART_COUNT}".format(**os.environ)
        first, new = (store.add(key, 1) == 1 for key in (attempt, f"{attempt} {line}"))
    except (RuntimeError, KeyError):  # no store: better twice than not at all
        return True
    return first if lost_peer else new
