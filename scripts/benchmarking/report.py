"""A results file as text for a terminal, in parts for a page, and its profiles as a chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inertiakv.evals.reporting import figures
from inertiakv.evals.reporting.table import aligned
from inertiakv.scripts.cli.program import say

Row = dict[str, str]


def text(result: dict[str, Any]) -> str:
    """Everything, for a terminal."""
    lines = [*about(result)]
    for title, rows in cases(result):
        lines += ["", title, *aligned(table_lines(rows))]
    for title, profile in profiles(result):
        total, width = sum(profile["ms"].values()) or 1.0, max(map(len, profile["ms"]))
        lines += ["", f"{title}: {profile['method']}"]
        for part, ms in sorted(profile["ms"].items(), key=lambda item: -item[1]):
            bar = "#" * round(40 * ms / total)
            lines.append(f"  {part.replace('_', ' '):{width}}  {ms:8.3f} ms  {ms / total:4.0%}  {bar}")
    left_out = [f"left out: {skipped_line(skipped)}" for skipped in result["skipped"]]
    return "\n".join([*lines, *([""] if left_out else []), *left_out])


def about(result: dict[str, Any]) -> Iterator[str]:
    """The machine, and how fast it reads and compiles."""
    machine = result["machine"]
    gpu = f"{machine['gpu']} ({machine['gpu_memory_gb']:g} GB), " if "gpu" in machine else ""
    cpu = f"{machine['cores']} cores of {machine['cpu']}"
    how = f"({machine['instructions']}, {machine['threads']} threads)"
    reads = f"reads {result['read_gb_per_s']:,.1f} GB/s ({result['read_by']})"
    yield f"{gpu}{cpu} {how}, {machine['memory_gb']:g} GB of memory; {reads}"
    if seconds := result.get("compile_seconds"):
        yield f"compiles in {seconds['cold']:.1f} s, in {seconds['warm']:.1f} s from the cache on disk"


def cases(result: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """A title and a table's rows for each setting that contenders were measured in."""
    settings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for contender in result["contenders"]:
        key = tuple(contender[key] for key in ("dtype", "context", "batch"))
        settings.setdefault(key, []).append(contender)
    for group in settings.values():
        yield _title(result["model"], group[0]), [_row(contender, result) for contender in group]


def table_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Head and rows of a table, without empty columns."""
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    return [heads, *([row[head] for head in heads] for row in rows)]


def _title(model: dict[str, Any], contender: dict[str, Any]) -> str:
    parts = [model["name"], contender["dtype"]]
    if quantize := model.get("quantize"):
        parts.append(f"{quantize} weights")
    if (ranks := model.get("ranks", 1)) > 1:
        parts.append(f"{ranks} ranks")
    parts += [f"{contender['context']:,} tokens of context", f"batch {contender['batch']}"]
    lengths = contender["lengths"]
    rows = f" ({min(lengths):,} to {max(lengths):,} tokens a row)" if contender["batch"] > 1 else ""
    return ", ".join(parts) + rows


def _row(contender: dict[str, Any], result: dict[str, Any]) -> Row:
    ms, kinds, peak = contender["ms_per_step"], contender.get("ms_by_kind"), contender["peak_bytes"]
    sources = (contender.get("part"), contender.get("merged_from", {}).get("name"))
    real = contender["start"] == "prefill"
    return {
        "contender": contender["name"] + "".join(f" ({source})" for source in sources if source),
        "ms/step": f"{ms['median']:.2f}",
        "p10 to p90": f"{ms['p10']:.2f} to {ms['p90']:.2f}",
        "scoring/other": f"{kinds['refresh']:.2f}/{kinds['plain']:.2f}" if kinds else "",
        "token/s": f"{contender['tokens_per_second']:,.1f}",
        "of batch 1": _of_batch_1(contender, result["contenders"]),
        f"of {result['reference']}": _number(contender["ratio"], ".3f"),
        "of the limit": f"{contender['share_of_limit']:.2f}",
        "kept": f"{contender['kept_tokens']:,}",
        "cache MB": f"{contender['cache_bytes'] / 1e6:,.1f}",
        "peak MB": _number(peak / 1e6 if real and peak is not None else None, ",.0f"),
        "first token ms": _number(contender["first_token_ms"], ",.0f"),
        "first step ms": _number(contender["first_step_ms"], ",.0f"),
    }


def _of_batch_1(contender: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """Tokens per second relative to those of the same contender at batch 1."""
    if contender["batch"] == 1:
        return ""
    same = [c for c in others if all(c[key] == contender[key] for key in ("name", "dtype", "context"))]
    alone = next((c["tokens_per_second"] for c in same if c["batch"] == 1), None)
    return "" if alone is None else f"{contender['tokens_per_second'] / alone:.2f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def skipped_line(skipped: dict[str, Any]) -> str:
    where = f"{skipped['name']} ({skipped['dtype']}, {skipped['context']:,} tokens, batch {skipped['batch']})"
    return f"{where}: {skipped['reason']}"


def profiles(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The title of each profile, and the profile. Older files have some of first steps, too."""
    for contender in result["contenders"]:
        where = "{name}, {dtype}, {context:,} tokens, batch {batch}".format(**contender)
        for what, key in (("A step", "profile"), ("The first step", "first_step_profile")):
            if contender.get(key):
                yield f"{what} of {where}", contender[key]


def draw(contenders: Sequence[dict[str, Any]], file: Path) -> None:
    """A picture with a bar for each contender with a profile, if matplotlib is installed."""
    if not figures.available():
        say(figures.MISSING)
        return
    bars = {
        "{name}, {dtype}\n{context:,} tokens, batch {batch}".format(**c): c["profile"]["ms"]
        for c in contenders
        if c.get("profile")
    }

    def paint(figure: Any, panels: Any) -> None:
        (axes,) = panels
        left = [0.0] * len(bars)
        for part in dict.fromkeys(part for ms in bars.values() for part in ms):
            widths = [ms.get(part, 0.0) for ms in bars.values()]
            axes.barh(list(bars), widths, left=left, label=part.replace("_", " "))
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("ms per decode step")
        axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)

    figures.draw(file, 1, (9, 1.6 + 0.5 * len(bars)), paint)
