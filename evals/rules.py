"""The rules that are compared: from the words of a command line to eviction configs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from inertiakv import POLICIES, EvictionConfig, policy
from inertiakv.config import DEFAULT_COMPRESSION, check_choice

KEPT = ("compression", "budget")
"""Fields that say how much is kept: the same for all policies, and no part of their names."""


_READERS: dict[str, Callable[[str], Any]] = {
    "tuple": lambda text: tuple(map(int, text.split("+"))),
    "bool": {"true": True, "false": False}.__getitem__,
    "int": int,
    "float": float,
}
"""By what is in a field's type."""


@dataclass(frozen=True)
class Rule:
    """One policy at one compression or budget."""

    policy: str
    """As it was asked for: a policy's name, and what was changed of it."""
    compression: float | None
    budget: int | None
    eviction: EvictionConfig | None
    """None keeps every token."""

    @property
    def key(self) -> tuple[str, float | None, int | None]:
        """What a record says of it."""
        return (self.policy, self.compression, self.budget)

    def __str__(self) -> str:
        """`full`, `inertiakv@0.9` where nine tokens of ten go, `inertiakv@128` where 128 stay."""
        return label(*self.key)


def label(policy: str, compression: float | None, budget: int | None) -> str:
    """How tables call a rule."""
    kept = [str(number) for number in (compression, budget) if number is not None]
    return "@".join([policy, *kept])


def choose_rules(
    policies: Sequence[str], compressions: Sequence[float], budgets: Sequence[int]
) -> list[Rule]:
    """Each policy at each compression, or else each budget, or at a compression of 0.9; `full` once.

    A policy is a name, and what is changed of it: `lazy4`, `lazy4:pool=13`, `inertiakv:alpha=0.3:sinks=4`,
    with the fields of `EvictionConfig`; `layers` are joined by a plus, `layers=0+2`. Raises ValueError for
    what is no policy, field or value, and for a rule that is there twice.
    """
    if compressions and budgets:
        raise ValueError("give compressions or budgets, not both")
    if (compressions or budgets) and set(policies) == {"full"}:
        raise ValueError("compressions and budgets have no effect on 'full', which evicts nothing")
    sizes: list[dict[str, Any]] = [{"compression": c} for c in compressions or [DEFAULT_COMPRESSION]]
    if budgets:
        sizes = [{"budget": b} for b in budgets]
    rules: dict[EvictionConfig | None, Rule] = {}
    for text in policies:
        name, changes = parse_policy(text)
        for size in sizes if name != "full" else [{}]:
            try:
                eviction = policy(name, **changes, **size)
            except ValueError as error:
                raise ValueError(f"{text}: {error}") from error
            rule = Rule(text, size.get("compression"), size.get("budget"), eviction)
            if eviction in rules:
                raise ValueError(f"{rules[eviction]} and {rule} are the same rule")
            rules[eviction] = rule
    return list(rules.values())


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """The name in `name:field=value:...`, and its changes. Raises ValueError where it does not read so;
    what a field may be is for the config to say."""
    name, *parts = text.split(":")
    hints, changes = get_type_hints(EvictionConfig), dict[str, Any]()
    check_choice("policy", name, tuple(POLICIES))
    for part in parts:
        field, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{text}: {part!r} is no field=value")
        check_choice(f"field in {text}:", field, tuple(hints))
        if field in KEPT:
            raise ValueError(f"{text}: {field} holds for all policies: give --{field}")
        if field in changes:
            raise ValueError(f"{text}: {field} is given twice")
        changes[field] = _read(value, str(hints[field]))
        if hints[field] is bool and changes[field] == value:
            raise ValueError(f"{text}: {field} must be true or false, got {value!r}")
    return name, changes


def _read(text: str, hint: str) -> Any:
    """What the first reader makes of a text that takes it, or the text."""
    for kind, read in _READERS.items():
        if kind in hint:
            with contextlib.suppress(ValueError, KeyError):
                return read(text)
    return text
