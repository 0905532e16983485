"""A picture of what compression does to speed, and to the number of sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inertiakv.evals.reporting.figures import draw


def paint_plan(file: Path, plan: dict[str, Any]) -> None:
    """Two panels: token/s, of all sessions that fit and of one; and how many fit, beside what the kept tokens
    alone would promise."""
    places: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for point in plan["sweep"]:
        places.setdefault((point["ranks"], point["context"]), []).append(point)

    def paint(figure: Any, axes: Any) -> None:
        speed, sessions = axes
        for number, ((ranks, context), points) in enumerate(places.items()):
            evicted = [100 * point["compression"] for point in points]
            promised = [points[0]["sessions"] / (1 - point["compression"]) for point in points]
            label = f"{context:,} tokens, {ranks} rank{'s' * (ranks > 1)}"
            for axis, style, values in (
                (speed, "-", [point["tokens_per_second_of_all"] for point in points]),
                (speed, ":", [point["tokens_per_second_of_one"] for point in points]),
                (sessions, "-", [point["sessions"] for point in points]),
                (sessions, ":", [point["largest_batch"] for point in points]),
                (sessions, "--", promised),
            ):
                axis.plot(evicted, values, style, color=f"C{number}", label=label if style == "-" else None)
        name = f"{plan['model']['name']} on {plan['device']['name']}, {plan['sweep'][0]['policy']}"
        speed.set(title=f"{name}: all sessions that fit (dotted: one)", ylabel="token/s", yscale="log")
        how = "prompts read one by one (dotted: together; dashed: by kept tokens alone)"
        sessions.set(title=f"sessions that fit, {how}", ylabel="sessions", yscale="symlog", ylim=(0, None))
        sessions.set_xlabel("% of the prompt evicted")
        speed.legend(frameon=False)

    draw(file, 2, (9, 4), paint)
