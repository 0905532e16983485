"""Metrics: vectors worked out by hand."""

from __future__ import annotations

import re
import sys

import pytest

from inertiakv.evals import metrics
from inertiakv.evals.metrics import (
    best,
    choice,
    count,
    extract_choice,
    prefix_share,
    qa_f1,
    retrieval,
    rouge_l,
    string_match_all,
    string_match_part,
)


@pytest.mark.parametrize(
    "prediction, reference, score",
    [
        ("The  Eiffel tower!", "eiffel Tower", 1),
        ("it is the Eiffel tower", "Eiffel tower", 2 * 2 / (4 + 2)),
        ("Paris\nParis Paris", "Paris", 2 / (3 + 1)),  # a bag: one of three is in common
        ("Paris", "Paris, Paris, Paris", 2 / (1 + 3)),
        ("theatre", "the atre", 0),
        ("U.S.A.", "USA", 1),  # punctuation goes without leaving a space
        ("well-known", "well known", 0),
        ("the", "a", 0),  # nothing is left of either
        ("London", "Paris", 0),
    ],
)
def test_qa_f1(prediction: str, reference: str, score: float) -> None:
    assert qa_f1(prediction, reference) == pytest.approx(score)


def test_the_best_of_three_references_counts() -> None:
    references = ["London", "Paris in France", "Paris"]
    assert best(qa_f1, "\nParis", references) == 1
    assert best(qa_f1, "France", references) == pytest.approx(2 / (1 + 3))
    assert best(qa_f1, "Rome", references) == 0


@pytest.mark.parametrize("metric", [qa_f1, rouge_l, retrieval, count, choice])
@pytest.mark.parametrize("prediction", ["", " ", "\n\n"])
def test_an_empty_prediction_is_wrong(metric: metrics.Metric, prediction: str) -> None:
    # The package alone would find something: the empty word behind the last full stop.
    assert best(metric, prediction, ["Paragraph 3 ends. ", "Paragraph 3"]) == 0


def test_rouge_is_the_package_that_longbench_uses() -> None:
    assert rouge_l("the cat sat on the mat", "the cat sat on the mat") == pytest.approx(1, abs=1e-6)
    # Words are sets: 5 in the reference, 2 in the prediction, which repeats them.
    assert rouge_l("the cat the cat", "the cat sat on the mat") == pytest.approx(
        2 * (2 / 5) / (1 + 2 / 5), abs=1e-6
    )
    # Sentences end at full stops, and a line break is a space: the longest common subsequence of each
    # sentence of the reference with each of the prediction, here "mat a" and "b c" ...
    assert rouge_l("mat a. b\nc", "b c. mat a") == pytest.approx(1, abs=1e-6)
    # ... and in one sentence the order counts: "b c" or "mat a" of four words.
    assert rouge_l("mat a b c", "b c mat a") == pytest.approx(0.5, abs=1e-6)
    assert rouge_l("a dog", "the cat") == 0
    assert re.fullmatch(r"rouge-l f \(rouge \d+\.\d+\.\d+\)", metrics.rouge_l_title())


def test_what_rouge_cannot_compare_is_zero() -> None:
    assert rouge_l("", "the cat") == 0
    assert rouge_l("...", "the cat") == 0
    words = " ".join(f"word{number}" for number in range(sys.getrecursionlimit()))
    assert rouge_l(words, "the cat") == 0  # it raises RecursionError


def test_rouge_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge", None)
    metrics._rouge.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'inertiakv\[eval\]'"):
        metrics.rouge_l_title()


def test_retrieval_and_count() -> None:
    assert retrieval("Paragraph 12", "Paragraph 12") == 1
    assert retrieval("12 or 13, but rather 12", "Paragraph 12") == pytest.approx(2 / 3)
    assert retrieval("Paragraph 1", "Paragraph 12") == 0
    assert retrieval("the twelfth", "Paragraph 12") == 0
    assert count("7 of 14", "7") == 0.5
    with pytest.raises(ValueError, match="'12'"):
        retrieval("12", "12")


@pytest.mark.parametrize(
    "prediction, letter",
    [
        ("The correct answer is (B).", "B"),
        ('"The correct answer is (B)".', "B"),
        ("**The correct answer is (C)** because", "C"),
        ("The correct answer is D", "D"),
        ("The correct answer is A, though (B) is near. The correct answer is (B)", "B"),  # brackets first
        ("I think.\nThe correct answer is (A)", "A"),
        ("The correct answer is (E)", None),
        ("The correct answer is: (A)", None),
        ("the correct answer is (A)", None),
        ("(A)", None),
        ("", None),
    ],
)
def test_the_choice_is_extracted(prediction: str, letter: str | None) -> None:
    assert extract_choice(prediction) == letter
    assert choice(prediction, "B") == (letter == "B")


def test_steps_count_up_to_the_first_wrong_one() -> None:
    truth = "3: a b\n4: c d\n5: e f\n6: g h"
    assert prefix_share(truth, truth) == 1
    assert prefix_share("Gladly:\n\n3:a b\n4:  c d", truth) == 0.5
    assert prefix_share("3: a b\n4: c x\n5: e f\n6: g h", truth) == 0.25
    assert prefix_share("3: a b\n5: e f\n6: g h", truth) == 0.25
    assert prefix_share("4: c d\n5: e f\n6: g h", truth) == 0
    assert prefix_share(truth + "\n7: i j", truth) == 1
    assert prefix_share("3: a b\n4: c", truth) == 0.25
    assert prefix_share("", truth) == 0
    # The first number is given; whoever says it again loses nothing, and gains nothing either.
    again = truth.split("3:", 1)[1]
    assert prefix_share(f"3: 3:{again}", truth) == prefix_share(f"3:\nHere:\n3:{again}", truth) == 1
    assert prefix_share("3:\n3:\n4: c d\n5: e f", truth) == prefix_share("3: 4: 3: a b", truth) == 0
    assert prefix_share("3: a b\n4:\n5: e f\n6: g h", truth) == 0.25
    assert prefix_share("3:\n4:\n5:\n6:", truth) == 0


@pytest.mark.parametrize(
    "prediction, references, share, part",
    [
        ("", ["a"], 0.0, 0.0),
        ("", ["a", "b"], 0.0, 0.0),
        ("the numbers are 12 and 15", ["12", "34"], 0.5, 1.0),
        ("34, 12", ["12", "34"], 1.0, 1.0),
        ("none of them", ["12", "34"], 0.0, 0.0),
        ("in PARIS,\nof course", ["paris"], 1.0, 1.0),
        ("paris", ["PARIS", "Lyon", "Metz", "Brest"], 0.25, 1.0),
        # Anywhere, also inside a word; control characters are new lines, and so part what they stand in.
        ("apartment", ["art"], 1.0, 1.0),
        ("New\tYork", ["new\nyork"], 1.0, 1.0),
        ("New\tYork", ["new york"], 0.0, 0.0),
        ("\x00 \x1f", ["\n"], 0.0, 0.0),
    ],
)
def test_string_match(prediction: str, references: list[str], share: float, part: float) -> None:
    assert string_match_all(prediction, references) == share
    assert string_match_part(prediction, references) == part
