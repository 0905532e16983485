"""Named eviction rules: the paper's (arXiv 2609.03515), and the ones that it is compared with.

All run under one protocol, in which some differ from their papers:

* The prompt is read whole and then evicted to budget at once, in the first decode step or before it; from
  then on one token goes for each that comes. Every method keeps the positions of the uncompressed sequence.
* What scores is the first decode step's query, or for a rule with a window the prompt's last ones: no rule
  sums attention over the whole prompt.
* Query heads that share a KV head share its tokens: scores are their mean. Papers without grouped queries
  speak of one query head at a time, which is the same where no heads share.
* Rules for prompts go on while decoding: a new token takes the mean utility, and the lowest goes. With
  `after="none"` or `"recency"` nothing goes, or the oldest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .config import OF_SCORES, EvictionConfig, check_choice

# What rules for prompts have in common.
_PROMPT: dict[str, Any] = {
    "scope": "head",
    "aggregation": "single",
    "refresh": "once",
    "evict_at": "prompt",
}
# The last 32 prompt queries, max pooling over 7 positions: the paper's setting for LongBench. It sums over
# the queries, here it is the mean: the order is the same.
_SNAPKV = EvictionConfig(**_PROMPT, window=32, recent=32, pool=7)

POLICIES: dict[str, EvictionConfig | None] = {
    "full": None,
    "inertiakv": EvictionConfig(),
    "lazy2": EvictionConfig(refresh=2),
    "lazy4": EvictionConfig(refresh=4),
    "lazy8": EvictionConfig(refresh=8),
    "lazy16": EvictionConfig(refresh=16),
    "score_free": EvictionConfig(refresh="once"),
    # Not in the paper: see "Rehearsing the answer" in docs/rules.md.
    "rehearsed": EvictionConfig(refresh=16, coupling="temporal", draft=64, drafts=2, window_by="max", pool=3),
    "single": EvictionConfig(aggregation="single"),
    "cumulative": EvictionConfig(aggregation="cumulative"),
    # arXiv 2306.14048: the sum of attention, half of the budget for the newest tokens. The paper's sums begin
    # with the prompt's first query.
    "h2o": EvictionConfig(scope="head", aggregation="cumulative", recent=0.5),
    # arXiv 2401.06104: the last query's attention, mean over all heads of a layer.
    "tova": EvictionConfig(scope="layer", aggregation="single"),
    # arXiv 2305.17118: how many queries paid a token more than the mean. The paper counts over a window of
    # the last queries, the prompt's among them, keeps few newest tokens and evicts half of the cache at once.
    "scissorhands": EvictionConfig(scope="head", scorer="above_mean", aggregation="cumulative", recent=0.5),
    # arXiv 2309.17453: four sinks and the newest. The paper numbers positions within the cache.
    "streaming_llm": EvictionConfig(scorer="none", sinks=4),
    # arXiv 2504.15364. The paper evicts after each block of the prompt.
    "keydiff": EvictionConfig(scope="head", scorer="keydiff", aggregation="single"),
    # arXiv 2406.11430. The paper leaves the first two layers whole.
    "knorm": EvictionConfig(scope="head", scorer="key_norm", aggregation="single"),
    "random": EvictionConfig(scorer="random", aggregation="single"),
    "random_after_prompt": EvictionConfig(scorer="random", aggregation="single", protect_prompt=True),
    # arXiv 2404.14469.
    "snapkv": _SNAPKV,
    # arXiv 2406.02069: SnapKV with a window of 8 and a budget that falls from layer to layer.
    "pyramidkv": dataclasses.replace(_SNAPKV, window=8, recent=8, allocation="pyramid"),
    # arXiv 2407.11550: SnapKV whose heads share the budget of their layer.
    "adakv": dataclasses.replace(_SNAPKV, allocation="adaptive"),
    # AdaKV with the scores of arXiv 2510.00636. That paper takes all of the prompt's queries, here it is the
    # last 512: all of them would be a second prefill.
    "adakv_ea": EvictionConfig(
        **_PROMPT, scorer="expected_attention", window=512, sinks=4, allocation="adaptive"
    ),
    # arXiv 2505.23416, at the cost of several prefills, and of memory: see `EvictionConfig.allocation`. The
    # paper asks for the repetition, in words: `Decoder(repeat_prefix=...)`. It keeps the system prompt, here
    # it is four sinks, and evicts nothing while decoding. `allocation="uniform"` gives each head the same,
    # which the paper offers, too.
    "kvzip": EvictionConfig(**_PROMPT, scorer="reconstruction", sinks=4, allocation="model"),
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
    changes.setdefault("alpha", None)  # its default, where the rule has an alpha
    if changes.get("scorer", base.scorer) != "random":
        changes.setdefault("scorer_seed", None)
    if changes.get("after", base.after) != "rule":
        changes.setdefault("refresh", 1)  # nothing is scored while decoding
    if changes.get("draft") == 0:
        changes.setdefault("drafts", 1)
        if not changes.get("window", base.window):
            changes.setdefault("window_by", "mean")
    if changes.get("scorer") == "none":
        for option in OF_SCORES:
            changes.setdefault(option, getattr(EvictionConfig, option))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]
