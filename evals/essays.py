"""The essays that needles are hidden in."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from inertiakv.models.files import check_text, read_json, read_text

from .data_files import hub_rows

BUNDLED = Path(__file__).parent / "data" / "essays.txt"
HUB = "alessiodevoto/paul_graham_essays"


@dataclass(frozen=True)
class Essays:
    """A long text. `name` says which one, for the results: `bundled`, a path, `hub:...`."""

    name: str
    text: str

    @cached_property
    def words(self) -> list[str]:
        """What stands between white space."""
        return self.text.split()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def take(self, count: int) -> str:
        """The first `count` words, a space between any two; the text begins again where it ends."""
        times = -(-count // len(self.words))
        return " ".join((self.words * times)[:count])


def load_essays(source: str | None = None) -> Essays:
    """None: the text that comes with the project. `hub`: Paul Graham's essays, RULER's own haystack. Else a
    file; of a .json file (RULER's `PaulGrahamEssays.json`) its `text`.

    Raises FileNotFoundError, ValueError for a file that is no text or has no words, and what `hub_rows`
    raises."""
    if source is None:
        name, text = "bundled", BUNDLED.read_text(encoding="utf-8")
    elif source == "hub":
        name, text = f"hub:{HUB}", "\n".join(row["text"] for row in hub_rows(HUB, None, "train"))
    elif not source:
        raise ValueError("the essays are a file or the word hub, got ''")
    else:
        name, text = source, _read(Path(source).expanduser())
    if not text.split():
        raise ValueError(f"the essays {name} have no words")
    return Essays(name, text)


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"no essays at {path}: neither a file nor the word hub")
    try:
        data = read_json(path) if path.suffix == ".json" else {"text": read_text(path)}
    except ValueError as error:  # of UTF-8 or of JSON
        raise ValueError(f"the essays {path} cannot be read: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("text"), str):
        raise ValueError(f'the essays {path} are not of the form {{"text": "..."}}')
    check_text(data["text"], f"the text of {path}")
    return str(data["text"])


# A sentence ends at . ! or ?, with closing quotes and brackets, before a space that no small letter follows.
_END = re.compile(r"""(?<=[.!?])(["'”’)\]]*)\s+(?=["'“‘(\[]*[^\sa-z])""")
# These full stops end no sentence: those of titles and initials.
_GOES_ON = re.compile(r"(?:^|[\s(])(?:Mr|Mrs|Ms|Dr|Prof|St|[A-Z])\.$")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text; joined with spaces they are the text again, if it has single ones only."""
    sentences: list[str] = []
    start = 0
    for match in _END.finditer(text):
        end = match.end(1)
        if not _GOES_ON.search(text, max(0, end - 8), end):
            sentences.append(text[start:end])
            start = match.end()
    return [*sentences, text[start:]] if text[start:] else sentences
