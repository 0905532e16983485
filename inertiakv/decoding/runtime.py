"""What conversations run on, and by which rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..attention.backend import choose_backend
from ..compiling.collectives import tensor_parallel_of
from ..compiling.graphs import Graphs, check_ties
from ..config import EvictionConfig
from ..decoding.tensor_parallel import check_rule
from ..model import LanguageModel
from ..requests.prompts import to_rows
from ..scoring.aggregation import Aggregation
from ..scoring.expected_attention import check_rotary
from ..scoring.learned import load_scorer
from .buffers import Buffers
from .prefill import Prefill
from .steps import Method


class Runtime:
    """Stays from one conversation to the next. The arguments are those of `Decoder`."""

    def __init__(
        self,
        model: LanguageModel,
        eviction: EvictionConfig | None,
        *,
        compile: bool,
        attention: str,
        prefill_chunk: int,
        repeat_prefix: Sequence[int],
        on_compile: Callable[[str], None] | None,
        on_draft: Callable[[int, int], None] | None,
        record: int,
        check_ranks: bool,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        if isinstance(record, bool) or not isinstance(record, int) or record < 0:
            raise ValueError(f"record must be a whole number of steps, got {record!r}")
        if repeat_prefix:
            to_rows(list(repeat_prefix), model.config.vocab_size, what="repeat_prefix")
        if compile and isinstance(model, torch.nn.Module):
            check_ties(model)
        self.model, self.record, self.repeat_prefix = model, record, tuple(repeat_prefix)
        self.on_draft = on_draft
        self.tp, self.checks_ranks = tensor_parallel_of(model), check_ranks
        if check_ranks and self.tp.size == 1:
            raise ValueError("check_ranks has no effect with a model on a single process")
        backend = choose_backend(attention, model.device, model.dtype, compile)
        self.method = Method(None, backend, tuple(dict.fromkeys(model.config.windows)))
        self.aggregation: Aggregation | None = None
        self.form: tuple[Any, ...] = ()
        self._aggregations: dict[tuple[Any, ...], Aggregation] = {}
        self.graphs = Graphs(compile, model.device, on_compile)
        self.buffers = Buffers(model)
        self.prefill = Prefill(model, self.method, self.graphs, prefill_chunk)
        self.use(eviction)

    def use(self, eviction: EvictionConfig | None) -> None:
        """Take another rule. Raises ValueError where it does not go with the model or the other options."""
        if not isinstance(eviction, EvictionConfig | None):
            raise ValueError(
                f"a rule is an EvictionConfig, as policy(name) gives it, or None; got {eviction!r}"
            )
        check_rule(eviction, self.tp)
        if self.record and self.tp.size > 1:
            raise ValueError(f"record: each of {self.tp.size} ranks has the scores of its own heads alone")
        if self.record and (eviction is None or not eviction.scores_one_set):
            raise ValueError("record needs a rule that scores, for one set of all layers (scope='shared')")
        if self.record and eviction is not None and eviction.draft:
            raise ValueError(f"record takes the steps of an answer, and not those of draft={eviction.draft}")
        if self.repeat_prefix and (eviction is None or eviction.scorer != "reconstruction"):
            raise ValueError("repeat_prefix has no effect without scorer='reconstruction'")
        aggregation = None if eviction is None else self._aggregation(eviction)
        self.method, self.aggregation = replace(self.method, eviction=eviction), aggregation
        self.buffers.scope = "shared" if eviction is None else eviction.scope
        self.buffers.recorded_steps = self.record
        self.due = torch.zeros(1, dtype=torch.bool) if self._takes_one_graph(eviction) else None
        # What the graphs of decode steps depend on beside shapes: rules that agree in it share them.
        self.form = ()
        if eviction is not None:
            self.form = (*eviction.form, self.buffers.recorded_steps, self.due is not None)

    def _takes_one_graph(self, eviction: EvictionConfig | None) -> bool:
        """Whether steps with and without refresh are one graph, which scores at each of them. On a CPU that
        costs next to nothing where the scores are sums of what attention computes anyway, and to compile a
        second graph takes many seconds."""
        if eviction is None or not eviction.refreshes or self.buffers.recorded_steps:
            return False
        alone_on_cpu = self.model.device.type == "cpu" and self.tp.size == 1
        return self.graphs.enabled and alone_on_cpu and eviction.scorer == "attention"

    @property
    def drafted(self) -> int:
        """Tokens of the rule's draft."""
        return 0 if self.method.eviction is None else self.method.eviction.draft

    def _aggregation(self, eviction: EvictionConfig) -> Aggregation:
        """Of the rule's form, whose graphs read its buffers, with the rule's own numbers in them."""
        model, known = self.model, self._aggregations.get(eviction.form)
        dtype, device = torch.promote_types(model.dtype, torch.float32), model.device
        learned = None
        if eviction.scorer_file is not None:
            learned = load_scorer(eviction.scorer_file, model.config, device=device, dtype=dtype)
        if eviction.scorer == "expected_attention":
            check_rotary(model)
        if known is not None:
            known.follow(eviction)
            if known.learned is not None and learned is not None:  # the file may have changed
                known.learned.load_state_dict(learned.state_dict())
            return known
        made = Aggregation(eviction, model.config.num_layers, dtype, device, learned)
        return self._aggregations.setdefault(eviction.form, made)
