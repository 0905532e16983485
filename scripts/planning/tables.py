"""A plan as tables, and as a page."""

from __future__ import annotations

from typing import Any

from inertiakv.evals.reporting.table import Row, Table

from .plans import FULL

ROOM_NOTE = """\
GB on each rank; all rows are as long as the context. *Batch*: the most rows whose prompts are read together,
as one call of a decoder does: all prompt caches at once. *Sessions*: the most that fit where prompts are read
one by one, and the others wait in their decode caches meanwhile, as with a decoder for each. *Of full*: their
number as a multiple of the full cache's. It is less than kept tokens alone would give: the whole cache of the
prompt that is being read needs its room first."""
STEP_NOTE = """\
*GB*: on each rank, with all prompts read together, or one by one where only that fits or nothing does.
*Limit*: reading the weights once and the kept K and V once at full bandwidth. *ms*: with the shares above, K
and V as allocated. *Of full*: token/s as a multiple of the full cache's."""


def about(plan: dict[str, Any]) -> list[str]:
    """What it is about, a line each."""
    model, device, shares = plan["model"], plan["device"], plan["shares"]
    weights = f"{model['quantize']} weights, " if model["quantize"] else ""
    size = f"{model['parameters'] / 1e9:,.2f} billion parameters, {model['weight_bytes'] / 1e9:,.1f} GB"
    flops = device["flops_per_second"] or shares["flops"]
    arithmetic = f", {flops / 1e12:,.4g} Tflop/s" if flops else ""
    filled = f"{device['memory_bytes'] / 1e9:,.1f} GB, of which {device['usable']:.0%} may be filled"
    lines = [
        f"{model['name']}, {weights}{model['dtype']}: {size}; "
        f"{model['kv_bytes_per_token']:,} bytes of K and V a token",
        f"{device['name']}: {filled}; {device['bytes_per_second'] / 1e9:,.0f} GB/s{arithmetic}",
        f"shares of it: weights {shares['weights']:.2f}, K and V {shares['kv']:.2f} ({shares['source']})",
    ]
    return lines + [f"note: {note}" for note in plan["notes"]]


def rooms(plan: dict[str, Any]) -> Table:
    head = ["policy", "ranks", "context", "kept", "weights", "prompt cache", "decode cache", "workspace"]
    full = {_place(room): room["sessions"] for room in plan["rooms"] if room["policy"] == FULL}
    lines = []
    for room in plan["rooms"]:
        row, sessions = room["bytes_a_row"], room["sessions"]
        sizes = (room["weight_bytes"], row["prompt_cache"], row["decode_cache"], row["workspace"])
        most = (f"{room['largest_batch']:,}", f"{sessions:,}", _ratio(sessions, full.get(_place(room))))
        lines.append([*_where(room), f"{room['kept_tokens']:,}", *map(_gb, sizes), *most])
    return Table("What fits", ROOM_NOTE, [*head, "batch", "sessions", "of full"], lines)


def steps(plan: dict[str, Any]) -> Table:
    head = ["policy", "ranks", "context", "batch", "GB", "fits", "limit ms", "ms", "token/s", "of full"]
    full = {(_place(s), s["batch"]): s["tokens_per_second"] for s in plan["steps"] if s["policy"] == FULL}
    drafts = any(s["rehearsal_ms"] for s in plan["steps"])
    lines = []
    for s in plan["steps"]:
        size = s["bytes_read_together"] if s["fits"] == "together" else s["bytes_read_one_by_one"]
        speed, of_full = s["tokens_per_second"], full.get((_place(s), s["batch"]))
        times = (f"{s['limit_ms']:.2f}", f"{s['ms']:.2f}", f"{speed:,.1f}", _ratio(speed, of_full))
        if drafts:
            times = (*times, f"{s['rehearsal_ms']:,.2f}")
        lines.append([*_where(s), f"{s['batch']:,}", _gb(size), s["fits"], *times, s["bottleneck"]])
    return Table("How fast", STEP_NOTE, [*head, *["rehearsal ms"] * drafts, "bottleneck"], lines)


def promises(plan: dict[str, Any]) -> list[str]:
    """What fewer tokens come to, a sentence for each place."""
    full = {_place(room): room for room in plan["rooms"] if room["policy"] == FULL}
    lines = []
    for room in plan["rooms"]:
        whole = full.get(_place(room))
        if room["policy"] == FULL or whole is None or not whole["sessions"]:
            continue
        fewer, more = whole["kept_tokens"] / room["kept_tokens"], room["sessions"] / whole["sessions"]
        count = f"{more:.1f} times more sessions ({whole['sessions']:,} to {room['sessions']:,})"
        where = f"{room['policy']} at {room['context']:,} tokens, ranks: {room['ranks']}"
        lines.append(
            f"{where}: {fewer:.1f} times fewer tokens are {count} where prompts are read one by one; "
            f"{whole['largest_batch']:,} rows with the full cache and {room['largest_batch']:,} evicted fit "
            "where they are read together"
        )
    return lines


def text(plan: dict[str, Any]) -> str:
    parts = ["\n".join(about(plan)), rooms(plan).text(), "\n".join(promises(plan)), steps(plan).text()]
    return "\n\n".join(part for part in parts if part)


def page(plan: dict[str, Any], picture: str | None) -> str:
    """As Markdown; `picture`: the address of its chart, if there is one."""
    title = f"# {plan['model']['name']} on {plan['device']['name']}: a plan"
    chart = f"![Token/s and sessions by compression]({picture})" if picture else ""
    lead = [f"`{plan['command']}`", "but for the shares nothing here was measured", *about(plan)]
    parts = [
        title,
        _bullets(lead),
        rooms(plan).markdown(),
        _bullets(promises(plan)),
        chart,
        steps(plan).markdown(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["ranks"], row["context"]


def _where(row: dict[str, Any]) -> Row:
    return [row["policy"], str(row["ranks"]), f"{row['context']:,}"]


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f}"


def _ratio(value: float, of: float | None) -> str:
    return f"{value / of:.2f}" if of else "-"
