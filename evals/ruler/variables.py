"""Tracking of variables: vt."""

from __future__ import annotations

import string
from functools import cache, cached_property
from itertools import pairwise
from random import Random

from .generated import NOISE, Draw, Generated, hide_in_lines, most_units
from .templates import VARIABLES

VARIABLES_A_CHAIN = 5
EXAMPLE_TOKENS = 500


class VariableTracking(Generated):
    """One chain, in lines of noise (the units), after an example of the same kind with its answer. The
    example has as many lines as fit 500 tokens, chat template included, whatever the length; its names, its
    value and its places are drawn anew for each sample."""

    max_new_tokens = VARIABLES.max_new_tokens

    def bounds(self, length: int, index: int) -> tuple[int, int | None]:
        return VARIABLES_A_CHAIN, None

    @cached_property
    def _example_lines(self) -> int:
        @cache
        def tokens(lines: int) -> int:
            rng = Random(f"{self.seed}/{self.name}/example")
            prompt, answer_prefix, _, _ = _chain(rng, 3, "12345", lines)
            return self.count_tokens(prompt, answer_prefix)

        if tokens(VARIABLES_A_CHAIN) > EXAMPLE_TOKENS:
            return VARIABLES_A_CHAIN
        return most_units(tokens, EXAMPLE_TOKENS, VARIABLES_A_CHAIN)

    def draw(self, rng: Random, length: int, index: int, units: int) -> Draw:
        shown, asked = (str(value) for value in rng.sample(range(10_000, 99_999), 2))
        prompt, answer_prefix, names, _ = _chain(rng, 3, shown, self._example_lines)
        example = f"{prompt}{answer_prefix} {' '.join(names)}\n"
        prompt, answer_prefix, names, depths = _chain(rng, 5, asked, units)
        facts = {"keys": [asked], "depths": depths}
        return Draw(f"{example}\n{prompt}", answer_prefix, tuple(names), facts)


def _chain(rng: Random, letters: int, value: str, lines: int) -> tuple[str, str, list[str], list[int]]:
    """Prompt, answer prefix, the names of the chain's variables, their depths."""
    names: list[str] = []
    while len(names) < VARIABLES_A_CHAIN:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    # The space at the end is RULER's.
    links = [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    hidden, depths = hide_in_lines(rng, [NOISE] * lines, [f"VAR {names[0]} = {value}", *links])
    return (
        VARIABLES.prompt.format(context="\n".join(hidden), query=value),
        VARIABLES.answer_prefix.format(count=len(names), query=value),
        names,
        depths,
    )
