"""What outlives a conversation: model, rule, buffers and graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch

from ..attention.backend import choose_backend
from ..compiling.collectives import tensor_parallel_of
from ..compiling.graphs import Graphs, check_ties
from ..compiling.numerics import accumulation_dtype
from ..compiling.toolchain import missing_toolchain
from ..config import EvictionConfig, check_int
from ..model import LanguageModel
from ..requests.prompts import to_rows
from ..scoring.expected_attention import check_rotary
from ..scoring.learned import load_scorer
from .buffers import Buffers
from .decoding_rule import DecodingRule
from .needs import Needs
from .prefill import Prefill
from .tensor_parallel import check_rule

log = logging.getLogger(__name__)
_PARTS = ("config", "device", "dtype", "head")
MAX_RULES = 32
"""Rules with graphs of their own that are kept: those used last."""


class Runtime:
    """The arguments are those of `Decoder`."""

    rule: DecodingRule
    graph_key: tuple[Any, ...]
    """What graphs of decode steps depend on beside shapes: rules that agree in it share them."""

    def __init__(
        self,
        model: LanguageModel,
        eviction: EvictionConfig | None,
        *,
        compile: bool | None,
        attention: str,
        prefill_chunk: int,
        repeat_prefix: Sequence[int],
        on_compile: Callable[[str], None] | None,
        on_draft: Callable[[int, int], None] | None,
        record: int,
        check_ranks: bool,
    ) -> None:
        _check_model(model)
        check_int("prefill_chunk", prefill_chunk, 1)
        check_int("record", record, 0)
        prefix: list[int] = []
        if not isinstance(repeat_prefix, Sized) or len(repeat_prefix) > 0:
            (prefix,) = to_rows([repeat_prefix], model.config.vocab_size, what="repeat_prefix")
        compile = _can_compile(compile, model.device)
        if compile and isinstance(model, torch.nn.Module):
            check_ties(model)
        self.model, self.repeat_prefix, self.on_draft = model, tuple(prefix), on_draft
        self.tp, self.checks_ranks = tensor_parallel_of(model), check_ranks
        if check_ranks and self.tp.size == 1:
            raise ValueError("check_ranks has no effect with a model on a single process")
        self.backend = choose_backend(attention, model.device, model.dtype, compile)
        self.graphs = Graphs(compile, model.device, on_compile)
        self.buffers = Buffers(model, recorded_steps=record)
        self._rules: dict[tuple[Any, ...], DecodingRule] = {}
        self.prefill = Prefill(model, self._make_rule(None), self.graphs, prefill_chunk)
        self.use(eviction)

    def use(self, eviction: EvictionConfig | None) -> None:
        """Take another rule. Raises ValueError where it does not go with the model or the other options."""
        if not isinstance(eviction, EvictionConfig | None):
            raise ValueError(
                f"a rule is an EvictionConfig, as policy(name) gives it, or None; got {eviction!r}"
            )
        check_rule(eviction, self.tp)
        if self.buffers.recorded_steps:
            self._check_recording(eviction)
        if self.repeat_prefix and (eviction is None or eviction.scorer != "reconstruction"):
            raise ValueError("repeat_prefix has no effect without scorer='reconstruction'")
        one_graph = self._takes_one_graph(eviction)
        graph_key = () if eviction is None else (*eviction.graph_key, one_graph)
        learned, device = None, self.model.device
        if eviction is not None and eviction.scorer_file is not None:
            dtype = accumulation_dtype(self.model.dtype)
            learned = load_scorer(eviction.scorer_file, self.model.config, device=device, dtype=dtype)
        if eviction is not None and eviction.scorer == "expected_attention":
            check_rotary(self.model)
        rule = self._rules.pop(graph_key, None)
        if rule is None:
            rule = self._make_rule(eviction, learned=learned, one_graph=one_graph)
        elif eviction is not None:
            rule.follow(eviction)
            if rule.learned is not None and learned is not None:  # the file may have changed
                rule.learned.load_state_dict(learned.state_dict())
        self._rules[graph_key] = rule  # the latest used is the last one
        if len(self._rules) > MAX_RULES:
            del self._rules[next(iter(self._rules))]
        self.rule, self.graph_key = rule, graph_key
        self.buffers.scope = "shared" if eviction is None else eviction.scope

    @property
    def needs(self) -> Needs:
        """What requests take of memory."""
        model, on_cpu = self.model, self.model.device.type == "cpu"
        return Needs(model.config, self.rule.config, model.dtype, on_cpu, self.backend == "flex")

    @property
    def drafted(self) -> int:
        """Tokens of the rule's draft."""
        return 0 if self.rule.config is None else self.rule.config.draft

    def _make_rule(self, eviction: EvictionConfig | None, **options: Any) -> DecodingRule:
        model = self.model
        sizes = (model.config.num_layers, model.config.windows, self.backend, model.dtype, model.device)
        return DecodingRule(eviction, *sizes, tp=self.tp, **options)

    def _takes_one_graph(self, eviction: EvictionConfig | None) -> bool:
        """Whether steps with and without refresh share one graph, which always scores. On a CPU that costs
        next to nothing if scores are sums of attention weights, and a second graph takes many seconds to
        compile."""
        if eviction is None or not eviction.refreshes or self.buffers.recorded_steps:
            return False
        alone_on_cpu = self.model.device.type == "cpu" and self.tp.size == 1
        return self.graphs.enabled and alone_on_cpu and eviction.scorer == "attention"

    def _check_recording(self, eviction: EvictionConfig | None) -> None:
        if self.tp.size > 1:
            raise ValueError(f"record: each of {self.tp.size} ranks has the scores of its own heads alone")
        if eviction is None or not eviction.scores_one_set:
            raise ValueError("record needs a rule that scores, for one set of all layers (scope='shared')")
        if eviction.draft:
            raise ValueError(f"record takes the steps of an answer, and not those of draft={eviction.draft}")


def _check_model(model: object) -> None:
    """Raise ValueError for what is no `LanguageModel`."""
    name, missing = type(model).__name__, [part for part in _PARTS if not hasattr(model, part)]
    if hasattr(model, "generate") and hasattr(model, "get_input_embeddings"):
        raise ValueError(
            f"{name} is a model of transformers: load it with inertiakv.models.load_model, or give "
            "inertiakv.integrations.transformers.InertiaCache to its generate"
        )
    if missing:
        raise ValueError(f"{name} is no language model for a Decoder: it has no {', '.join(missing)}")


def _can_compile(asked: bool | None, device: torch.device) -> bool:
    """Whether steps are compiled. Raises ValueError where they should be and cannot."""
    missing = None if asked is False else missing_toolchain(device)
    if missing is None:
        return asked is not False
    if asked:
        raise ValueError(f"decode steps cannot be compiled: {missing}")
    log.warning("decode steps run uncompiled, which is slower: %s", missing)
    return False
