"""How a step's time grows with what is kept: a straight line, whose slope is what K and V are read with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MIN_CONTEXTS = 3
"""A line through two points says nothing of whether it is one."""


def lines(contenders: Sequence[dict[str, Any]], bytes_per_second: float) -> list[dict[str, Any]]:
    """One for each contender that was measured at several contexts.

    * `kept_gb_per_s`: what the slope comes to, bytes of K and V over time;
    * `intercept_ms`, and `weights_ms`, the part of it in which weights can be read at the machine's
      bandwidth; `added_ms`, the rest;
    * `worst_deviation`: by which part of it a measured time lies off the line.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for contender in contenders:
        groups.setdefault(tuple(contender[key] for key in ("name", "dtype", "batch")), []).append(contender)
    return [
        {"name": name, "dtype": dtype, "batch": batch, **_line(group, bytes_per_second)}
        for (name, dtype, batch), group in groups.items()
        if len({contender["kept_tokens"] for contender in group}) >= MIN_CONTEXTS
    ]


def _line(group: Sequence[dict[str, Any]], bytes_per_second: float) -> dict[str, Any]:
    kept = torch.tensor([c["kept_tokens"] for c in group], dtype=torch.float64)
    ms = torch.tensor([c["ms_per_step"]["median"] for c in group], dtype=torch.float64)
    # Of relative deviations the least squares: else the largest time alone would say where the line begins.
    columns = torch.stack([1 / ms, kept / ms], dim=1)
    intercept, slope = torch.linalg.lstsq(columns, torch.ones_like(ms)[:, None]).solution[:, 0].tolist()
    first = group[0]
    token_bytes = first["cache_bytes_by_formula"] / first["kept_tokens"]
    weights_ms = 1000 * (first["bytes_per_step"] - first["cache_bytes_by_formula"]) / bytes_per_second
    return {
        "contexts": [c["context"] for c in group],
        "kept_tokens": [c["kept_tokens"] for c in group],
        "kept_gb_per_s": round(token_bytes / slope / 1e6, 2) if slope > 0 else None,
        "intercept_ms": round(intercept, 4),
        "weights_ms": round(weights_ms, 4),
        "added_ms": round(intercept - weights_ms, 4),
        "worst_deviation": round(float(((intercept + slope * kept) / ms - 1).abs().max()), 4),
    }
