"""How many examples a test draws, by the profile of Hypothesis that `conftest.py` loads."""

from __future__ import annotations

from hypothesis import settings


def share(part: int) -> settings:
    """One `part`-th of the profile's examples, where each takes long."""
    assert settings.default is not None
    return settings(max_examples=max(1, settings.default.max_examples // part))
