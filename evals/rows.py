"""Published data: from files of the user's, else from the Hugging Face hub, without its code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hub import hub_rows

Row = dict[str, Any]
_SHOWN = 8
"""Names of what is in a folder that an error tells."""


@dataclass(frozen=True)
class Hub:
    """Where the hub has a data set, as files that need no script."""

    repository: str
    config: str | None
    split: str


@dataclass(frozen=True)
class Rows:
    rows: list[Row]
    source: str
    """The file or the hub's data set, with what tells its version."""


def find_file(title: str, files: Sequence[str], data: Path | None) -> Path | None:
    """The file of `title`, under the first of its names, `files`, that the folder `data` has; None where no
    folder was given.

    Raises FileNotFoundError, which tells what is there, for a folder that has none of them: who names one
    does not mean the hub.
    """
    if data is None:
        return None
    for path in (data / name for name in files):
        if path.is_file():
            return path
    there = sorted(f"{path.name}/" if path.is_dir() else path.name for path in data.iterdir())
    if len(there) > _SHOWN:
        there[_SHOWN:] = [f"{len(there) - _SHOWN} more"]
    has = f"{data} has none of {', '.join(files)}, but {', '.join(there) or 'nothing'}"
    raise FileNotFoundError(f"no data for {title}: {has}")


def load_rows(
    title: str, files: Sequence[str], fields: Mapping[str, type], hub: Hub, data: Path | None
) -> Rows:
    """The rows of the data set that errors call `title`.

    files: what its file may be called below `data`: a .jsonl, .parquet, or .json with a list.
    fields: what every row must have, and of which type.
    hub: taken where `data` is None.

    Raises FileNotFoundError where they are not there, ValueError for a file, a line or a row that is wrong.
    """
    file = find_file(title, files, data)
    if file is not None:
        rows = list(_read(file))
        source = f"{file} (sha256 {hashlib.sha256(file.read_bytes()).hexdigest()})"
    else:
        try:
            rows = hub_rows(hub.repository, hub.config, hub.split)
        except (ImportError, ConnectionError) as error:
            raise FileNotFoundError(f"no data for {title}: no data folder was given; and {error}") from error
        digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
        source = f"hub {hub.repository} {hub.config or ''} {hub.split} (rows' sha256 {digest})"
    for number, row in enumerate(rows, 1):
        _check(row, fields, f"{file or source}: row {number}")
    if not rows:
        raise ValueError(f"{file or source} has no rows")
    return Rows(rows, source)


def _read(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        yield from _read_parquet(file)
        return
    try:
        text = file.read_text(encoding="utf-8")
        rows = json.loads(text) if file.suffix == ".json" else None
    except ValueError as error:  # of UTF-8 or of JSON
        raise ValueError(f"{file} is not JSON: {error}") from error
    if file.suffix == ".json":
        if not isinstance(rows, list):
            raise ValueError(f"{file} is not a list of rows")
        yield from rows
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number} is not JSON: {error}") from error


def _read_parquet(file: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(f"{file} needs the package pyarrow: pip install -e '.[eval]'") from error
    try:
        rows: list[Row] = read_table(file).to_pylist()
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file} is not a parquet file: {error}") from error
    return rows


def _check(row: Any, fields: Mapping[str, type], where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object")
    for field, kind in fields.items():
        if field not in row:
            raise ValueError(f"{where} has no field {field!r}")
        if not isinstance(row[field], kind):
            raise ValueError(f"{where}: {field!r} is not a {kind.__name__} but {row[field]!r:.40}")
