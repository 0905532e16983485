"""What `scripts/gpu_check.sh` has run as one results file: `combine FOLDER DEVICE [FILE]`.

The folder holds `parts.tsv` (name, exit code and seconds of each part), a log of each part, and the results
file of each part that measured something.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from inertiakv.scripts.benchmarking import report, results

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 30
"""How much is kept of the log of a part that failed."""


def main(folder: Path, device: str, target: Path | None) -> int:
    parts = [_part(folder, *line.split("\t")) for line in (folder / "parts.tsv").read_text().splitlines()]
    if device != "cpu" and " passed" not in parts[0]["last_line"]:
        parts[0]["passed"] = False  # without a GPU the tests are skipped
    files = {part["name"]: folder / f"{part['name']}.json" for part in parts}
    measured = {name: results.read(file) for name, file in files.items() if file.is_file()}
    result = combined(measured) | {"parts": parts}
    if target is None:  # without results there is nothing for the page of benchmarks
        target = Path("gpu_check.json")
        if measured:
            name = str(result["machine"].get("gpu", "cpu")).lower().removeprefix("nvidia ")
            target = ROOT / "benchmarks" / f"{re.sub('[^a-z0-9]+', '-', name).strip('-')}.json"
    results.write(target, result)
    if measured:
        print(report.text(result))
    if any(contender.get("profile") for contender in result["contenders"]):
        report.draw(result["contenders"], target.with_suffix(".png"))
    for part in parts:
        how = "passed" if part["passed"] else f"FAILED ({part['exit_code']})"
        print(f"{part['name']:24} {how}, {part['seconds']} s: {part['last_line'][:100]}")
    print(f"written to {target}")
    failed = [part["name"] for part in parts if not part["passed"]]
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return 1 if failed else 0


def _part(folder: Path, name: str, code: str, seconds: str) -> dict[str, Any]:
    log = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    part = {"name": name, "passed": code == "0", "exit_code": int(code), "seconds": int(seconds)}
    part["last_line"] = log[-1] if log else ""
    return part if code == "0" else part | {"log": log[-LOG_LINES:]}


def combined(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results of the first part, with the contenders of all. Each names its part and the bandwidth that
    its share of the limit refers to."""
    if not measured:
        return {"contenders": [], "skipped": []}
    result = next(iter(measured.values())) | {"command": "scripts/gpu_check.sh"}
    for key in ("contenders", "skipped"):
        result[key] = [
            {**entry, "part": name, "read_gb_per_s": part["read_gb_per_s"]}
            for name, part in measured.items()
            for entry in part[key]
        ]
    compiled = (part["compile_seconds"] for part in measured.values())
    result["compile_seconds"] = next(filter(None, compiled), None)
    return result


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(Path(given[0]), given[1], Path(given[2]) if given[2:] and given[2] else None))
