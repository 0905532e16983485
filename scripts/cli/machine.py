"""Options for the model and the device, and errors of both in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from inertiakv.models.checkpoint import find_device
from inertiakv.scripts.cli.arguments import Option


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and on which device."""

    model: str = "smollm2-135m"
    """A folder, a name on the Hugging Face hub, or smollm2-135m."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """auto: as the checkpoint has it."""
    device: Annotated[str | None, Option(metavar="DEVICE", default="cuda, or else cpu")] = None
    """cpu, cuda, cuda:1, ..."""


def check_device(name: str | None) -> None:
    """Raise ValueError for a device that cannot be used. None leaves the choice to `load_model`."""
    if name is not None and find_device(name).type == "meta":
        raise ValueError(f"device {name!r} cannot be used: it holds no numbers")


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around `load_model`: its errors as ValueError, but for a lack of memory; no bars of transformers."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        yield
    except (RuntimeError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(str(error)) from error
