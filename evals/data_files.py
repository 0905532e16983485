"""Published data sets: from the user's files, else from the Hugging Face hub, without running its code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inertiakv.models.extras import install
from inertiakv.models.files import disk_error, parse_json, read_json, read_text

Row = dict[str, Any]
Hub = tuple[str, str | None, str]
"""Where the hub has a data set, as files that need no script: repository, config, split."""
_PROBE_SECONDS = 5


def hub_rows(repository: str, config: str | None, split: str) -> list[Row]:
    """The rows of one split. In the hub client's offline mode (HF_HUB_OFFLINE=1) they come from its cache.

    Raises ImportError without the package `datasets`, and ConnectionError, soon, where the hub does not
    answer or has no such data."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{repository} needs the package datasets: {install('eval')}") from error
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        if not HF_HUB_OFFLINE:
            # Without this the data sets' own client tries again and again, for minutes.
            HfApi().dataset_info(repository, timeout=_PROBE_SECONDS)
        return list(datasets.load_dataset(repository, config, split=split))
    except Exception as error:
        if full := disk_error(error):
            raise full from None
        # The classes of connection errors change with the versions of the client's HTTP library.
        raise ConnectionError(
            f"{repository} cannot be had from the Hugging Face hub ({type(error).__name__}: {error})"
        ) from error


def find_file(title: str, files: Sequence[str], data: Path | None) -> Path | None:
    """The file of `title`, under the first of its names, `files`, that the folder `data` has; None where no
    folder was given.

    Raises FileNotFoundError for a folder that has none of them: who names one does not mean the hub.
    """
    if data is None:
        return None
    for path in (data / name for name in files):
        if path.is_file():
            return path
    raise FileNotFoundError(f"no data for {title}: {data} has none of {', '.join(files)}")


def load_dataset(
    title: str, files: Sequence[str], fields: Mapping[str, type], hub: Hub, data: Path | None
) -> tuple[list[Row], str]:
    """The rows of the data set that errors call `title`, and its source: the file or the hub's data set, with
    the hash of its content.

    files: names that its file may have below `data`: a .jsonl, .parquet, or .json with a list.
    fields: what every row must have, and of which type.
    hub: read where `data` is None.

    Raises FileNotFoundError where there is none, ValueError for a malformed file, line or row.
    """
    file = find_file(title, files, data)
    if file is not None:
        rows = _read(file)
        source = f"{file} (sha256 {hashlib.sha256(file.read_bytes()).hexdigest()})"
    else:
        try:
            rows = hub_rows(*hub)
        except (ImportError, ConnectionError) as error:
            raise FileNotFoundError(f"no data for {title}: no data folder was given; and {error}") from error
        digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
        source = f"hub {hub[0]} {hub[1] or ''} {hub[2]} (rows' sha256 {digest})"
    for number, row in enumerate(rows, 1):
        _check(row, fields, f"{file or source}: row {number}")
    if not rows:
        raise ValueError(f"{file or source} has no rows")
    return rows, source


def _read(file: Path) -> list[Row]:
    if file.suffix == ".parquet":
        return _read_parquet(file)
    rows: Any = read_json(file) if file.suffix == ".json" else []
    if not isinstance(rows, list):
        raise ValueError(f"{file} is not a list of rows")
    for number, line in enumerate(read_text(file).split("\n") if file.suffix != ".json" else [], 1):
        rows += [parse_json(line, f"{file}, line {number} is not JSON")] if line.strip() else []
    return list(rows)


def _read_parquet(file: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(f"{file} needs the package pyarrow: {install('eval')}") from error
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
