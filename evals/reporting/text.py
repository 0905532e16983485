"""Numbers and names as tables have them. Scores are percent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from inertiakv.evals.statistics import Comparison, Estimate


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def signed(value: float) -> str:
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text


def interval(of: Estimate | Comparison) -> str:
    form = percent if isinstance(of, Estimate) else signed
    return f"{form(of.low)} to {form(of.high)}"


def p_value(p: float) -> str:
    if math.isnan(p):
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def published(value: float | None) -> str:
    """A figure of the paper's, in percent already."""
    return "-" if value is None else f"{value:.2f}"


def task_name(task: str) -> str:
    """Without its benchmark."""
    return task.partition(":")[2] or task


def ranges(numbers: Sequence[int]) -> str:
    """`3, 17-24`: of ascending numbers."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def ordered(value: Any) -> tuple[bool, float, str]:
    """A key that sorts the values of an option: numbers first."""
    number = isinstance(value, (int, float))
    return not number, float(value) if number else 0.0, str(value)


def shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
