"""What tells eviction rules apart, by their configs: names are for people."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from inertiakv import EvictionConfig, policy

Rule = dict[str, Any]
"""The fields of a config, without the budget."""

OWNERS = {"alpha": "aggregation", "scorer_seed": "scorer", "scorer_file": "scorer"}
"""Fields that follow from another one, where that is another one."""


def rule(config: dict[str, Any] | None) -> Rule | None:
    """The rule of a config as a run describes it; None is the full cache. Options that are newer than the run
    have their defaults."""
    if config is None:
        return None
    budget = {"compression", "budget"}
    return {name: value for name, value in (_DEFAULTS | config).items() if name not in budget}


def named(name: str) -> Rule | None:
    """The rule of a policy, `inertiakv`, or of one with options changed, `inertiakv:alpha=0.3,pool=7`."""
    name, _, changes = name.partition(":")
    options = dict(change.split("=") for change in changes.split(",") if change)
    found = policy(name, **{option: json.loads(value) for option, value in options.items()})
    return rule(None if found is None else plain(found))


def plain(config: EvictionConfig) -> dict[str, Any]:
    """A config as JSON gives it back."""
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return fields


def changes(one: Rule, base: Rule) -> Rule:
    """The options of `one` that are not as in `base`, without those that only follow from another."""
    names = [name for name in one if one[name] != base.get(name)]
    return {name: one[name] for name in names if OWNERS.get(name) not in names}


_DEFAULTS = plain(EvictionConfig())
