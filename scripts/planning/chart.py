"""A picture of what compression does to speed, and to the number of sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evals.reporting.figures import draw


def paint_plan(file: Path, plan: dict[str, Any]) -> None:
    """Two panels: token/s, of one session and of all that fit; and how many fit, beside what the kept tokens
    alone would promise."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for point in plan["sweep"]:
        lines.setdefault(f"{point['context']:,} tokens, ranks: {point['ranks']}", []).append(point)

    def paint(figure: Any, axes: Any) -> None:
        speed, sessions = axes
        for number, (label, points) in enumerate(lines.items()):
            evicted = [100 * point["compression"] for point in points]
            promised = [points[0]["sessions"] / (1 - point["compression"]) for point in points]
            for axis, style, what, values in (
                (speed, "-", "one session", [point["tokens_per_second_of_one"] for point in points]),
                (speed, "--", "all that fit", [point["tokens_per_second_of_all"] for point in points]),
                (sessions, "-", "read one by one", [point["sessions"] for point in points]),
                (sessions, ":", "read together", [point["largest_batch"] for point in points]),
                (sessions, "-.", "by kept tokens alone", promised),
            ):
                axis.plot(evicted, values, style, color=f"C{number}", label=f"{label}, {what}")
        title = f"{plan['model']['name']} on {plan['device']['name']}, {plan['sweep'][0]['policy']}"
        speed.set(title=title, ylabel="token/s", yscale="log")
        sessions.set(xlabel="% of the prompt evicted", ylabel="sessions", yscale="symlog", ylim=(0, None))
        for axis in axes:
            axis.legend(frameon=False, fontsize=7)

    draw(file, 2, (9, 4), paint)
