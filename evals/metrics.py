"""Scores of one prediction against its references, from 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Sequence

# RULER: which references does the prediction contain, in whatever case and wherever?


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of references found: with two, one of them found, 0.5."""
    return sum(_found(prediction, references)) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Whether any reference was found: with two, one of them found, 1."""
    return float(any(_found(prediction, references)))


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    # RULER's own cleaning: a control character is a new line.
    text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
    return [reference.lower() in text for reference in references]
