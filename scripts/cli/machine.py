"""The device and the model that a script was told to use, and what can be wrong with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def check_device(name: str | None) -> None:
    """Raise ValueError for a device that is not there. None leaves the choice to `load_model`."""
    if name is None:
        return
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}") from error


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around `load_model`: what keeps a model from being loaded, as ValueError."""
    try:
        yield
    except (RuntimeError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(str(error)) from error
