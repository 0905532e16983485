"""A script as a program: its exit code, and which of several processes, that torchrun has started, speaks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch

_STORE_PATIENCE = timedelta(seconds=10)


def run(main: Callable[[], None]) -> int:
    """Call `main` and return the exit code of the process: 2, and one line on stderr, for what a user got
    wrong. What several processes would say is said by the one that comes first."""
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` say, has gone; nor must the interpreter's own flush complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        line = _one_line(error)
        if _is_news(line, lost=isinstance(error, ConnectionError)):
            print(f"error: {line}", file=sys.stderr, flush=True)
        return 2
    return 0


@contextlib.contextmanager
def silence(wanted: bool) -> Iterator[None]:
    """Let nothing be printed where this is `wanted`."""
    if not wanted:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or "out of memory"


def _is_news(line: str, *, lost: bool) -> bool:
    """Whether no other process of torchrun's has said so; where this one has `lost` another, whether none has
    said anything, since what that one had to say tells more. They ask torchrun itself, which outlives them.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import TCPStore

    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, timeout=_STORE_PATIENCE, wait_for_workers=False)
        attempt = "said {TORCHELASTIC_RUN_ID} {TORCHELASTIC_RESTART_COUNT}".format(**os.environ)
        first, new = (store.add(key, 1) == 1 for key in (attempt, f"{attempt} {line}"))
    except (RuntimeError, KeyError):  # said twice is better than not at all
        return True
    return first if lost else new
