"""Results as tables: for a terminal, and for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from inertiakv.evals.reporting.table import aligned

Row = dict[str, str]


def cases(result: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """A title and a table's rows for each setting that contenders were measured in."""
    settings = dict.fromkeys(map(_setting, result["contenders"]))
    return [
        (_title(result, *setting), [_row(c, result) for c in result["contenders"] if _setting(c) == setting])
        for setting in settings
    ]


def text(result: dict[str, Any]) -> str:
    """Everything, for a terminal."""
    lines = [machine(result), reading(result)]
    if result.get("compile_seconds"):
        lines.append(compiling(result))
    for title, rows in cases(result):
        lines += ["", title, *aligned(table_lines(rows))]
    for contender in result["contenders"]:
        for what, profile in profiles(contender):
            lines += ["", *_profile(contender, what, profile)]
    lines += [""] * bool(result.get("scaling")) + [scaling_line(line) for line in result.get("scaling", ())]
    lines += [""] * bool(result["skipped"])
    lines += [f"left out: {skipped_line(skipped)}" for skipped in result["skipped"]]
    return "\n".join(lines)


def table_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Head and rows of a table, without empty columns."""
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    return [heads, *([row[head] for head in heads] for row in rows)]


def machine(result: dict[str, Any]) -> str:
    about = result["machine"]
    parts = [
        f"{about['cores']} cores of {about['cpu']} ({about['instructions']}, {about['threads']} threads)"
    ]
    if "gpu" in about:
        parts.insert(0, f"{about['gpu']} ({about['gpu_memory_gb']:g} GB)")
    return f"{', '.join(parts)}, {about['memory_gb']:g} GB of memory"


def reading(result: dict[str, Any]) -> str:
    return f"reads {result['read_gb_per_s']:,.1f} GB/s ({result['read_by']})"


def compiling(result: dict[str, Any]) -> str:
    seconds = result["compile_seconds"]
    return f"compiles in {seconds['cold']:.1f} s, in {seconds['warm']:.1f} s from the cache on disk"


def scaling_line(line: dict[str, Any]) -> str:
    kept = line["kept_tokens"]
    who = f"{line['name']}, {line['dtype']}, batch {line['batch']}"
    speed = "no time" if line["kept_gb_per_s"] is None else f"{line['kept_gb_per_s']:,.1f} GB/s"
    return (
        f"{who}, from {min(kept):,} to {max(kept):,} tokens kept: {line['intercept_ms']:.2f} ms a step, of "
        f"which reading the weights needs {line['weights_ms']:.2f}, and {speed} for K and V; no time is off "
        f"this line by more than {line['worst_deviation']:.0%}"
    )


def skipped_line(skipped: dict[str, Any]) -> str:
    where = f"{skipped['name']} ({skipped['dtype']}, {skipped['context']:,} tokens, batch {skipped['batch']})"
    return f"{where}: {skipped['reason']}"


def _setting(contender: dict[str, Any]) -> tuple[str, int, int]:
    return contender["dtype"], contender["context"], contender["batch"]


def _title(result: dict[str, Any], dtype: str, context: int, batch: int) -> str:
    weights = f", {quantize} weights" if (quantize := result["model"].get("quantize")) else ""
    weights += f", {ranks} ranks" if (ranks := result["model"].get("ranks", 1)) > 1 else ""
    title = f"{result['model']['name']}, {dtype}{weights}, {context:,} tokens of context, batch {batch}"
    lengths = next(c["lengths"] for c in result["contenders"] if _setting(c) == (dtype, context, batch))
    return title if batch == 1 else f"{title} ({min(lengths):,} to {max(lengths):,} tokens a row)"


def _row(contender: dict[str, Any], result: dict[str, Any]) -> Row:
    ms, ratio, kinds = contender["ms_per_step"], contender["ratio"], contender.get("ms_by_kind")
    merged = contender.get("merged_from", {}).get("name")
    alone = _tokens_per_second_alone(contender, result)
    return {
        "contender": contender["name"] + "".join(f" ({of})" for of in (contender.get("part"), merged) if of),
        "ms/step": f"{ms['median']:.2f}",
        "p10 to p90": f"{ms['p10']:.2f} to {ms['p90']:.2f}",
        "scoring/other": f"{kinds['refresh']:.2f}/{kinds['plain']:.2f}" if kinds else "",
        "token/s": f"{contender['tokens_per_second']:,.1f}",
        "of batch 1": "" if alone is None else f"{contender['tokens_per_second'] / alone:.2f}",
        f"of {result['reference']}": "" if ratio is None else f"{ratio:.3f}",
        "of the limit": f"{contender['share_of_limit']:.2f}",
        "kept": f"{contender['kept_tokens']:,}",
        "cache MB": f"{contender['cache_bytes'] / 1e6:,.1f}",
        "peak MB": _peak(contender),
        "first token ms": _milliseconds(contender["first_token_ms"]),
        "first step ms": _milliseconds(contender["first_step_ms"]),
    }


def _tokens_per_second_alone(contender: dict[str, Any], result: dict[str, Any]) -> float | None:
    """What the same contender does at batch 1, if this is another batch."""
    wanted = {**{key: contender[key] for key in ("name", "dtype", "context")}, "batch": 1}
    alone = (c for c in result["contenders"] if all(c[key] == value for key, value in wanted.items()))
    return None if contender["batch"] == 1 else next((c["tokens_per_second"] for c in alone), None)


def _peak(contender: dict[str, Any]) -> str:
    """Of a real prompt's memory."""
    real = contender["start"] == "prefill" and contender["peak_bytes"] is not None
    return f"{contender['peak_bytes'] / 1e6:,.0f}" if real else ""


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def profiles(contender: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was profiled of a contender, and the profile."""
    for what, key in (("a step", "profile"), ("the first step", "first_step_profile")):
        if contender.get(key):
            yield what, contender[key]


def _profile(contender: dict[str, Any], what: str, profile: dict[str, Any]) -> list[str]:
    ms = profile["ms"]
    total = sum(ms.values()) or 1.0
    where = f"{contender['name']}, {contender['context']:,} tokens, batch {contender['batch']}"
    lines = [f"{what} of {where}, {contender['dtype']}: {profile['method']}"]
    width = max(map(len, ms))
    for part, value in sorted(ms.items(), key=lambda item: -item[1]):
        bar = "#" * round(40 * value / total)
        lines.append(f"  {part.replace('_', ' '):{width}}  {value:8.3f} ms  {value / total:4.0%}  {bar}")
    return lines + at_least(profile)


def at_least(profile: dict[str, Any]) -> list[str]:
    """A sentence on what parts of a step would take alone, where the profile says so."""
    parts = [f"{what} {ms:.1f} ms" for what, ms in profile.get("at_least_ms", {}).items()]
    return [f"  alone, as fast as the library does them: {', '.join(parts)}"] if parts else []
