"""How files of text and JSON are read, in all of the project: as UTF-8, with or without a byte order mark.

Also which errors are the disk's, where a library's errors are taken for those of a network.
"""

import errno
import json
from pathlib import Path
from typing import Any

_OF_DISKS = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "ENAMETOOLONG", "EMFILE", "ENFILE")
    if hasattr(errno, name)
}


def read_text(path: str | Path) -> str:
    """The text of a file. Raises ValueError where it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: str | Path) -> Any:
    """The content of a JSON file. Raises ValueError where it is none."""
    return parse_json(read_text(path), f"{path} is not valid JSON")


def read_json_object(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FileNotFoundError, and ValueError where there is none in it."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is missing")
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def parse_json(text: str, problem: str) -> Any:
    """The value that a JSON text says. Raises ValueError, which begins with `problem`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{problem}: {error}") from error


def check_text(text: str, what: str) -> None:
    """Raise ValueError for a text that UTF-8 cannot say: one with lone surrogates, which stand for bytes that
    are no text, or are halves of a pair in JSON."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{what} is not UTF-8 text: it has a lone surrogate")


def disk_error(error: BaseException | None) -> OSError | None:
    """What the disk says, the error itself or one of its causes: it is full, or may not be written."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_DISKS:
            return error
        error = error.__cause__ or error.__context__
    return None
