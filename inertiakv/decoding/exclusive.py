"""One call at a time."""

from __future__ import annotations

import threading
from types import TracebackType


class Exclusive:
    """A lock that a call holds: one from another thread waits, one from within the call is an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def is_held(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise ValueError("a callback cannot use the decoder that calls it")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._owner = None
        self._lock.release()
