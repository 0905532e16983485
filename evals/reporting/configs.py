"""What tells eviction rules apart, by their configs: names are for people."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from inertiakv import EvictionConfig, policy
from inertiakv.evals.rules import KEPT, parse_policy

Rule = dict[str, Any]
"""The fields of a config, without the budget."""

OWNERS = {"alpha": "aggregation", "scorer_seed": "scorer", "scorer_file": "scorer"}
"""Fields that follow from another one, where that is another one."""


def rule(config: dict[str, Any] | None) -> Rule | None:
    """The rule of a config as a run describes it; None is the full cache. Options that are newer than the run
    have their defaults."""
    if config is None:
        return None
    return {name: value for name, value in (_DEFAULTS | config).items() if name not in KEPT}


@functools.cache
def named(text: str) -> Rule | None:
    """The rule of a policy as a command line has it: `inertiakv`, or `inertiakv:alpha=0.3:pool=7`."""
    name, fields = parse_policy(text)
    found = policy(name, **fields)
    return rule(None if found is None else plain(found))


def plain(config: EvictionConfig) -> dict[str, Any]:
    """A config as JSON gives it back."""
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return fields


def changes(of: Rule) -> Rule:
    """The options that are not InertiaKV's, without those that only follow from another."""
    names = [name for name in of if of[name] != INERTIAKV.get(name)]
    return {name: of[name] for name in names if OWNERS.get(name) not in names}


_DEFAULTS = plain(EvictionConfig())
INERTIAKV = {name: value for name, value in _DEFAULTS.items() if name not in KEPT}
"""The defaults are the paper's rule."""
