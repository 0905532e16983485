"""Scores of one prediction against its references, from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from inertiakv.models.extras import install

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


# LongBench, LongBench-v2, needle grid: how well does the prediction meet the reference that suits it best?

Metric = Callable[[str, str], float]
"""From a prediction and one reference."""


def best(metric: Metric, prediction: str, references: Sequence[str]) -> float:
    """The score against the reference that suits it best. What is empty but for white space is wrong, also
    where a metric would find its nothing in a reference: `rouge` finds the empty word behind a last full
    stop."""
    if not prediction.strip():
        return 0.0
    return max(metric(prediction, reference) for reference in references)


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the two bags of words, normalised as SQuAD does it."""
    words, truth = normalise_answer(prediction).split(), normalise_answer(reference).split()
    same = sum((Counter(words) & Counter(truth)).values())
    return 2 * same / (len(words) + len(truth)) if same else 0.0


def normalise_answer(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space, in this order."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def rouge_l(prediction: str, reference: str) -> float:
    """F of ROUGE-L by the package `rouge`, whose sentences end at full stops and whose words are sets. What
    it raises an exception for (nothing to compare, a sentence too long for its recursion) is 0, as in
    LongBench's own script."""
    try:
        return float(_rouge().get_scores(prediction, reference)[0]["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_l_title() -> str:
    """What `rouge_l` is, with the package's version. Packages by other names count otherwise."""
    from importlib.metadata import version

    _rouge()
    return f"rouge-l f (rouge {version('rouge')})"


@cache
def _rouge() -> Any:
    try:
        from rouge import Rouge
    except ImportError as error:
        raise ValueError(f"ROUGE needs the package rouge: {install('eval')}") from error
    return Rouge(metrics=["rouge-l"])


def retrieval(prediction: str, reference: str) -> float:
    """Share of the prediction's numbers that are the one of the reference, `Paragraph 7`."""
    found = re.search(r"Paragraph (\d+)", reference)
    if not found:
        raise ValueError(f"a reference is 'Paragraph' and a number, got {reference!r}")
    return count(prediction, found[1])


def count(prediction: str, reference: str) -> float:
    """Share of the prediction's numbers that are the reference, digit by digit."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def extract_choice(prediction: str) -> str | None:
    """The letter that is said to be the correct answer; None: none is."""
    text = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text)
    found = found or re.search(r"The correct answer is ([A-D])", text)
    return found[1] if found else None


def choice(prediction: str, reference: str) -> float:
    """Whether the letter is the reference."""
    return float(extract_choice(prediction) == reference)


# Chains: how far is every step right?


def prefix_share(prediction: str, reference: str) -> float:
    """Share of the reference's steps that the prediction has, in order, before its first wrong one.

    A step is a line that begins with a number and a colon; other lines (an introduction, a bare number) are
    passed over, and so are white space and a number that is said again: who is given `3:` may well begin with
    it. All steps of the reference count, written or not: a short answer gains nothing."""
    steps, truth = _steps(prediction), _steps(reference)
    right = 0
    for step, true in zip(steps, truth, strict=False):
        if step != true:
            break
        right += 1
    return right / len(truth)


def _steps(text: str) -> list[str]:
    lines = (re.sub(r"^(\d+:)\1+", r"\1", "".join(line.split())) for line in text.splitlines())
    return [line for line in lines if re.match(r"\d+:.", line)]
