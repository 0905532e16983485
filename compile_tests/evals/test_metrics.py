"""Vectors of the scorers."""

import pytest

from inertiakv.evals.metrics import string_match_all, string_match_part


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
