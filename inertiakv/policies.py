"""Named eviction rules: the paper's, and the ones that it is compared with."""

from __future__ import annotations

import dataclasses

from .config import EvictionConfig, check_choice

_SNAPKV = EvictionConfig(
    scope="head",
    aggregation="single",
    refresh="once",
    evict_at="prompt",
    window=32,
    recent=32,
    pool=7,
)

POLICIES: dict[str, EvictionConfig | None] = {
    "full": None,
    "inertiakv": EvictionConfig(),
    "lazy2": EvictionConfig(refresh=2),
    "lazy4": EvictionConfig(refresh=4),
    "lazy8": EvictionConfig(refresh=8),
    "lazy16": EvictionConfig(refresh=16),
    "score_free": EvictionConfig(refresh="once"),
    "single": EvictionConfig(aggregation="single"),
    "cumulative": EvictionConfig(aggregation="cumulative"),
    "h2o": EvictionConfig(scope="head", aggregation="cumulative", recent=0.5),
    "tova": EvictionConfig(scope="layer", aggregation="single"),
    "scissorhands": EvictionConfig(scope="head", scorer="above_mean", aggregation="cumulative", recent=0.5),
    "streaming_llm": EvictionConfig(scorer="none", sinks=4),
    "keydiff": EvictionConfig(scope="head", scorer="keydiff", aggregation="single"),
    "knorm": EvictionConfig(scope="head", scorer="key_norm", aggregation="single"),
    "random": EvictionConfig(scorer="random", aggregation="single"),
    "random_after_prompt": EvictionConfig(scorer="random", aggregation="single", protect_prompt=True),
    "snapkv": _SNAPKV,
    "pyramidkv": dataclasses.replace(_SNAPKV, allocation="pyramid"),
    "adakv": dataclasses.replace(_SNAPKV, allocation="adaptive"),
}
"""The named policies. `None`, the full cache, keeps every token."""


def policy(name: str, **changes: object) -> EvictionConfig | None:
    """The named policy, with fields of its config replaced; None is the full cache.

    `budget=` takes the place of the policy's compression. Raises ValueError for an unknown name or field, and
    for any change to `full`, which has nothing to configure.
    """
    check_choice("policy", name, tuple(POLICIES))
    base = POLICIES[name]
    options = {field.name for field in dataclasses.fields(EvictionConfig)}
    for change in changes:
        check_choice("option", change, tuple(sorted(options)))
    if base is None:
        if changes:
            raise ValueError(f"{', '.join(changes)} has no effect with policy 'full', which evicts nothing")
        return None
    if changes.get("budget") is not None:
        changes.setdefault("compression", None)
    if changes.get("aggregation", base.aggregation) != "ema":
        changes.setdefault("alpha", None)
    if changes.get("scorer", base.scorer) != "random":
        changes.setdefault("scorer_seed", None)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]
