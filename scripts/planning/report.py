"""A plan as tables, as a page and as a chart."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from inertiakv.evals.reporting.figures import draw
from inertiakv.evals.reporting.table import Row, Table

from . import fitting

FULL = "full"
MEMORY_NOTE = """\
GB on each rank; all rows are as long as the context. *Batch*: the most rows whose prompts are read together,
as one call of a decoder does: all prompt caches at once. *Sessions*: the most that fit where prompts are read
one by one, and the others wait in their decode caches meanwhile, as with a decoder for each. *Of full*: their
number as a multiple of the full cache's. It is less than kept tokens alone would give: the whole cache of the
prompt that is being read needs its room first."""
SPEED_NOTE = """\
*GB*: on each rank, with all prompts read together, or one by one where only that fits or nothing does.
*Limit*: reading the weights once and the kept K and V once at full bandwidth. *ms*: with the shares above, K
and V as allocated. *Of full*: token/s as a multiple of the full cache's."""


def text(plan: dict[str, Any]) -> str:
    parts = [
        *(fill(line, 110, break_on_hyphens=False) for line in fitting.sentences(plan)),
        "\n".join(about(plan)),
        memory_table(plan).text(),
        "\n".join(compared(plan)),
        speed_table(plan).text(),
    ]
    return "\n\n".join(part for part in parts if part)


def page(plan: dict[str, Any], picture: str | None) -> str:
    """As Markdown; `picture`: the address of its chart, if there is one."""
    parts = [
        f"# {plan['model']['name']} on {plan['device']['name']}: a plan",
        *fitting.sentences(plan),
        _bullets([f"`{plan['command']}`", "but for the shares nothing here was measured", *about(plan)]),
        memory_table(plan).markdown(),
        _bullets(compared(plan)),
        f"![Token/s and sessions by compression]({picture})" if picture else "",
        speed_table(plan).markdown(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def about(plan: dict[str, Any]) -> list[str]:
    """Model, device and notes, a line each."""
    model, device, shares = plan["model"], plan["device"], plan["shares"]
    weights = f"{model['quantize']} weights, " if model["quantize"] else ""
    size = f"{model['parameters'] / 1e9:,.2f} billion parameters, {model['weight_bytes'] / 1e9:,.1f} GB"
    flops = device["flops_per_second"] or shares["flops"]
    arithmetic = f", {flops / 1e12:,.4g} Tflop/s" if flops else ""
    filled = f"{device['memory_bytes'] / 1e9:,.1f} GB, of which {device['usable']:.0%} may be filled"
    return [
        f"{model['name']}, {weights}{model['dtype']}: {size}; "
        f"{model['kv_bytes_per_token']:,} bytes of K and V a token",
        f"{device['name']}: {filled}; {device['bytes_per_second'] / 1e9:,.0f} GB/s{arithmetic}",
        f"shares of it: weights {shares['weights']:.2f}, K and V {shares['kv']:.2f} ({shares['source']})",
        *(f"note: {note}" for note in plan["notes"]),
    ]


def memory_table(plan: dict[str, Any]) -> Table:
    head = ["policy", "ranks", "context", "kept", "weights", "prompt cache", "decode cache", "workspace"]
    full = {_place(f): f["sessions"] for f in plan["rooms"] if f["policy"] == FULL}
    lines = []
    for f in plan["rooms"]:
        row, sessions = f["bytes_a_row"], f["sessions"]
        sizes = (f["weight_bytes"], row["prompt_cache"], row["decode_cache"], row["workspace"])
        most = (f"{f['largest_batch']:,}", f"{sessions:,}", _ratio(sessions, full[_place(f)]))
        lines.append([*_where(f), f"{f['kept_tokens']:,}", *map(_gb, sizes), *most])
    return Table("What fits", MEMORY_NOTE, [*head, "batch", "sessions", "of full"], lines)


def speed_table(plan: dict[str, Any]) -> Table:
    head = ["policy", "ranks", "context", "batch", "GB", "fits", "limit ms", "ms", "token/s", "of full"]
    full = {(_place(s), s["batch"]): s["tokens_per_second"] for s in plan["steps"] if s["policy"] == FULL}
    drafts = any(s["rehearsal_ms"] for s in plan["steps"])
    lines = []
    for s in plan["steps"]:
        size = s["bytes_read_together"] if s["fits"] == "together" else s["bytes_read_one_by_one"]
        tokens_per_second = s["tokens_per_second"]
        times = [f"{s['limit_ms']:.2f}", f"{s['ms']:.2f}", f"{tokens_per_second:,.1f}"]
        times.append(_ratio(tokens_per_second, full[_place(s), s["batch"]]))
        times += [f"{s['rehearsal_ms']:,.2f}"] * drafts
        lines.append([*_where(s), f"{s['batch']:,}", _gb(size), s["fits"], *times, s["bottleneck"]])
    return Table("How fast", SPEED_NOTE, [*head, *["rehearsal ms"] * drafts, "bottleneck"], lines)


def compared(plan: dict[str, Any]) -> list[str]:
    """What fewer tokens come to, a sentence for each number of ranks and context."""
    full = {_place(f): f for f in plan["rooms"] if f["policy"] == FULL}
    lines = []
    for f in plan["rooms"]:
        whole = full[_place(f)]
        if f["policy"] == FULL or not whole["sessions"]:
            continue
        fewer, more = whole["kept_tokens"] / f["kept_tokens"], f["sessions"] / whole["sessions"]
        count = f"{more:.1f} times more sessions ({whole['sessions']:,} to {f['sessions']:,})"
        lines.append(
            f"{f['policy']} at {f['context']:,} tokens, ranks: {f['ranks']}: {fewer:.1f} times fewer tokens "
            f"are {count} where prompts are read one by one; {whole['largest_batch']:,} rows with the full "
            f"cache and {f['largest_batch']:,} evicted fit where they are read together"
        )
    return lines


def draw_chart(file: Path, plan: dict[str, Any]) -> None:
    """Two panels over compression: token/s of all sessions that fit and of one; and how many fit, beside what
    the kept tokens alone would promise."""
    sweeps: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for point in plan["sweep"]:
        sweeps.setdefault(_place(point), []).append(point)

    def paint(figure: Any, axes: Any) -> None:
        speed, sessions = axes
        for number, ((ranks, context), points) in enumerate(sweeps.items()):
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


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["ranks"], row["context"]


def _where(row: dict[str, Any]) -> Row:
    return [row["policy"], str(row["ranks"]), f"{row['context']:,}"]


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f}"


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of else "-"
