"""What one forward pass knows: the queries, the slots that they see, and how tokens are scored.

Shape letters: B batch, T query tokens, X retention sets of a layer (1, or one for each KV head), N slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from ..compiling.collectives import SINGLE_PROCESS, TensorParallel
from .backend import Backend
from .mask import BlockLists

if TYPE_CHECKING:  # for annotations alone: these modules import this one
    from ..config import ScorerName
    from ..eviction.pooling import Pooling
    from ..eviction.protection import Limits
    from ..scoring.expected_attention import Rotations
    from ..scoring.learned import LearnedScorer


class ForwardState(NamedTuple):
    """The same for all layers that share retention sets. Made of tensors, modules and constants alone, so
    that the compiler can tell whether two layers take the same inputs."""

    # What goes in.
    query_BT: Tensor
    """Positions of the queries; -1 marks padding, which sees nothing and is seen by nobody."""
    slots_BT: Tensor | None
    """Where new tokens go; None: one token a row, into each set's free slot."""
    backend: Backend
    windows: tuple[int | None, ...]
    """The sliding windows of the model's layers, each once; None is full attention."""
    slots_used: int | None = None
    """How many of the first slots hold tokens with the new ones, which are the last of them in the row with
    the most; more than there are where padding would reach beyond. None: all."""
    slots_before: int | None = None
    """How many hold tokens without the new ones, where that is the same in every set; None elsewhere."""
    active_B: Tensor | None = None
    """Rows that take part; None: all."""
    new: int | None = None
    """How many of the queries are new tokens, the last ones; None: all. The others are cached already."""
    mean_B: Tensor | None = None
    """Rows whose new tokens start from the mean utility of those before them; the others start from 0."""

    # What is evicted afterwards.
    limits: Limits | None = None
    """Evict a token from each full set, but none that these protect; None: evict nothing."""
    by_age: bool = False
    """Evict the oldest, whatever the utilities are."""
    pooling: Pooling | None = None
    """Pool utilities before evicting by them."""

    # How tokens are scored.
    scorer: ScorerName | None = None
    """None: this pass does not score."""
    scored_B: Tensor | None = None
    """Rows whose utilities are updated."""
    learned: LearnedScorer | None = None
    """The scorer `learned`."""
    rotations: Rotations | None = None
    """Of the queries, for the scorer `expected_attention`."""
    window_by: Literal["mean", "max"] = "mean"
    """What becomes of the scores of several queries that score together."""
    record: bool = False
    """Hand out each layer's scores, too."""
    tp: TensorParallel = SINGLE_PROCESS
    """Processes that share the retention sets, each with heads of its own."""

    # What the queries see, once the new tokens have been entered.
    slots_BXT: Tensor | None = None
    """Slots of the new tokens in each set."""
    position_BXN: Tensor | None = None
    """The position in each slot, as far as slots are filled."""
    visible_BXTN: tuple[Tensor, ...] = ()
    """The mask of a single query, one for each of `windows`."""
    blocks: tuple[BlockLists, ...] = ()
    """FlexAttention's block lists, one for each of `windows`."""
