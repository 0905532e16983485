"""One results file of what `scripts/gpu_check.sh` has run, a chart of its profile where matplotlib is there,
and a summary: `combine FOLDER DEVICE [FILE]`.

The folder holds `parts.tsv` (name, exit code and seconds of each part), a log of each part, and the results
file of each that measured.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from inertiakv.scripts.benchmarking import breakdown, results

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 30
"""Lines that are kept of the log of a part that failed."""


def main(folder: Path, device: str, target: Path | None) -> int:
    parts = [_part(folder, *line.split("\t")) for line in (folder / "parts.tsv").read_text().splitlines()]
    if device != "cpu" and " passed" not in parts[0]["last_line"]:
        parts[0]["passed"] = False  # without a GPU the tests are skipped
    measured = {
        part["name"]: results.read(file)
        for part in parts
        if (file := folder / f"{part['name']}.json").is_file()
    }
    result = combined(measured) | {"parts": parts}
    if target is None:
        # Where nothing was measured there is nothing for the page of benchmarks either.
        folder = ROOT / "benchmarks" if measured else Path.cwd()
        target = folder / f"{_machine_name(result) if measured else 'gpu_check'}.json"
    results.write(target, result)
    if any(contender.get("profile") for contender in result["contenders"]):
        breakdown.draw(result["contenders"], target.with_suffix(".png"), print)
    print(summary(result))
    print(f"written to {target}")
    failed = [part["name"] for part in parts if not part["passed"]]
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return 1 if failed else 0


def _part(folder: Path, name: str, code: str, seconds: str) -> dict[str, Any]:
    log = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    part = {
        "name": name,
        "passed": code == "0",
        "exit_code": int(code),
        "seconds": int(seconds),
        "last_line": log[-1] if log else "",
    }
    return part if code == "0" else part | {"log": log[-LOG_LINES:]}


def combined(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The first part's results file, with the contenders of all, each marked with its part and with the
    bandwidth that its share of the limit is a part of."""
    if not measured:
        return {"contenders": [], "skipped": []}
    result = dict(next(iter(measured.values())))
    result["command"] = "scripts/gpu_check.sh"
    for key in ("contenders", "skipped"):
        result[key] = [
            {**entry, "part": name, "read_gb_per_s": part["read_gb_per_s"]}
            for name, part in measured.items()
            for entry in part[key]
        ]
    found = (part["compile_seconds"] for part in measured.values())
    result["compile_seconds"] = next((seconds for seconds in found if seconds), None)
    return result


def _machine_name(result: dict[str, Any]) -> str:
    about = result.get("machine", {})
    return re.sub(r"[^a-z0-9]+", "-", str(about.get("gpu", "cpu")).lower().removeprefix("nvidia ")).strip("-")


def summary(result: dict[str, Any]) -> str:
    """What matters, the most important last."""
    lines = [f"{c['name']}: left out, {c['reason']} ({c['part']})" for c in result["skipped"]]
    if result.get("compile_seconds"):
        lines.append("compile seconds: {cold} cold, {warm} warm".format(**result["compile_seconds"]))
    for contender in reversed(result["contenders"]):
        ms, peak = contender["ms_per_step"]["median"], contender["peak_bytes"]
        lines.append(
            f"{contender['part']:24} {contender['name']:12} {ms:8.3f} ms/step,"
            f" {contender['tokens_per_second']:8.1f} token/s, {contender['share_of_limit']:.2f} of the limit,"
            f" cache {contender['cache_bytes'] / 1e9:.2f} GB, peak {(peak or 0) / 1e9:.2f} GB"
        )
    for part in reversed(result["parts"]):
        how = "passed" if part["passed"] else f"FAILED ({part['exit_code']})"
        lines.append(f"{part['name']:24} {how}, {part['seconds']} s: {part['last_line'][:100]}")
    return "\n".join(lines)


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(Path(given[0]), given[1], Path(given[2]) if given[2:] and given[2] else None))
