"""The choice between dense attention and FlexAttention."""

from __future__ import annotations

from typing import Literal

import torch

Backend = Literal["dense", "flex"]


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, compiled: bool) -> Backend:
    """The backend for `auto`, `dense` or `flex`. The only place that decides.

    On CPUs dense attention is several times faster for one query and gives the weights for free; on CUDA
    FlexAttention skips empty blocks and stores no logits. Uncompiled FlexAttention rounds its logits in low
    precision, so it is refused there (ValueError).
    """
    if name not in ("auto", "dense", "flex"):
        raise ValueError(f"unknown attention {name!r}; choose from auto, dense, flex")
    if name == "auto":
        return "flex" if device.type == "cuda" and compiled else "dense"
    if name == "flex" and not compiled and dtype.itemsize < 4:
        raise ValueError(f"attention='flex' in {dtype} needs compile=True: uncompiled, it rounds its logits")
    return name  # type: ignore[return-value]
