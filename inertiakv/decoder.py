"""The public interface: prefill, evict, decode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from .cache.budgets import Budgets
from .cache.slot_cache import SlotCache, bucket
from .compiling.graphs import Graphs
from .config import EvictionConfig
from .decoding import saving
from .decoding.batch import MAX_EOS_IDS, NO_TOKEN, READ_EVERY, BatchState
from .decoding.decoding_rule import DecodingRule
from .decoding.generation import Conversation, GenerationLoop, Stop
from .decoding.prefill import Progress
from .decoding.recording import Recording
from .decoding.runtime import Runtime
from .model import LanguageModel
from .requests.prompts import Prompts, check_positions, count_rows, is_single, to_rows
from .requests.results import Generation, Stats
from .requests.sampling import Sampling

_GREEDY = Sampling()


class Decoder:
    """Decodes a model while keeping no more of each row's KV cache than its budget.

    One conversation at a time: `generate` and `stream` start a new one, `extend` adds a turn to it, `decode`
    goes on with it, `save` and `load` carry it over. Buffers and graphs stay for the next conversation, which
    compiles nothing where its shapes fit theirs.

    * `model`: offers what `inertiakv.model.LanguageModel` says, as `inertiakv.models.Transformer` does.
    * `eviction`: the rule; None keeps every token.
    * `compile`: run the decode step as compiled graphs; without, the same functions run eagerly.
    * `attention`: "dense", "flex", or "auto" for the faster one on the model's device.
    * `prefill_chunk`: tokens of a prompt that go through the model at a time.
    * `repeat_prefix`: token ids of an instruction that goes before the repetitions of scorer
      "reconstruction".
    * `record`: decode steps of an answer to record for `recording`.
    * `on_compile`: called before a graph is compiled, which takes seconds, with what it is for; not where it
      is loaded as another process has compiled it.
    * `on_draft`: called before a draft is decoded, which takes as long as so much of an answer, with its
      number, from 1, and how many there are.
    * `check_ranks`: for debugging, see at every step that all processes that hold the model have chosen the
      same tokens and kept the same; RuntimeError where they have not.
    """

    def __init__(
        self,
        model: LanguageModel,
        eviction: EvictionConfig | None = EvictionConfig(),  # noqa: B008 (immutable)
        *,
        compile: bool = True,
        attention: str = "auto",
        prefill_chunk: int = 2048,
        repeat_prefix: Sequence[int] = (),
        on_compile: Callable[[str], None] | None = None,
        on_draft: Callable[[int, int], None] | None = None,
        record: int = 0,
        check_ranks: bool = False,
    ) -> None:
        self.model = model
        options = (
            compile,
            attention,
            prefill_chunk,
            repeat_prefix,
            on_compile,
            on_draft,
            record,
            check_ranks,
        )
        self._runtime = Runtime(model, eviction, *options)
        self._conversation: Conversation | None = None
        self._latest: GenerationLoop | None = None  # which alone may go on

    def use(self, eviction: EvictionConfig | None) -> None:
        """Go by another rule from the next conversation on; the one there is is forgotten.

        Rules that differ in their budget, smoothing, refreshes, or in how they evict a prompt share their
        graphs: a sweep compiles nothing anew where shapes are the same. Raises ValueError for a rule that
        does not go with the model or with the decoder's other options.
        """
        self._runtime.use(eviction)
        self._forget()

    @property
    def eviction(self) -> EvictionConfig | None:
        return self._runtime.rule.config

    @property
    def rule(self) -> DecodingRule:
        return self._runtime.rule

    @property
    def graphs(self) -> Graphs:
        return self._runtime.graphs

    @property
    def stats(self) -> Stats:
        """Of the conversation so far; of no rows where there is none."""
        return Stats([], []) if self._conversation is None else self._conversation.stats

    @property
    def cache(self) -> SlotCache | None:
        return None if self._conversation is None else self._conversation.cache

    @property
    def batch(self) -> BatchState:
        return self._current().batch

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        sampling: Sampling = _GREEDY,
        eos_token_ids: Sequence[int] | None = None,
        stop: Stop | None = None,
        progress: Progress | None = None,
    ) -> Generation:
        """Start a conversation with `prompts`, one list of token ids or several of any lengths, and answer
        it.

        `eos_token_ids`: None for the model's own. `stop`: see `StopStrings`. `progress`: called with the
        prompt tokens done and in all. Raises, before any work, ValueError for prompts, lengths or options
        that cannot be, and MemoryError with an estimate where the caches do not fit.
        """
        self._check_options(count_rows(prompts), max_new_tokens, sampling, eos_token_ids)
        self.prefill(prompts, max_new_tokens=max_new_tokens, progress=progress)
        return self.decode(max_new_tokens, sampling=sampling, eos_token_ids=eos_token_ids, stop=stop)

    def stream(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        sampling: Sampling = _GREEDY,
        eos_token_ids: Sequence[int] | None = None,
        stop: Stop | None = None,
        progress: Progress | None = None,
    ) -> Iterator[int | list[int | None]]:
        """As `generate`, token by token: an int for one prompt, and for a batch a list with None where a row
        has ended. `decoder.stats` tells the rest afterwards."""
        self._check_options(count_rows(prompts), max_new_tokens, sampling, eos_token_ids)
        self.prefill(prompts, max_new_tokens=max_new_tokens, progress=progress)
        single = is_single(prompts)
        for tokens in self._tokens(max_new_tokens, sampling, eos_token_ids, stop, read_every=1):
            yield tokens[0] if single else [None if token == NO_TOKEN else token for token in tokens]

    def prefill(self, prompts: Prompts, *, max_new_tokens: int = 0, progress: Progress | None = None) -> None:
        """Start a conversation with `prompts` without answering yet. `max_new_tokens` sizes the buffers for
        `decode`. Raises as `generate` does."""
        rows = to_rows(prompts, self.model.config.vocab_size)
        conversation = self._begin([len(row) for row in rows], max_new_tokens)
        with self._whole():
            conversation.read_prompts(rows, max_new_tokens, progress)

    def take_prompt(self, source: Decoder, *, max_new_tokens: int = 0) -> None:
        """Start a conversation with the prompts that another decoder of the same model has prefilled, by
        copying their K and V: one prefill then serves several rules. Raises ValueError where `source` has
        evicted of them or has begun to answer."""
        theirs = source._current()
        if source is self:
            raise ValueError("a decoder cannot take a prompt over from itself")
        if source.model is not self.model:
            raise ValueError("the prompt belongs to another model")
        lengths = theirs.stats.prompt_tokens
        if theirs.logits_BV is None or theirs.cache.mean_B.tolist() != lengths:
            raise ValueError("only a prompt of which nothing was evicted or answered can be taken over")
        conversation = self._begin(lengths, max_new_tokens)
        with self._whole():
            conversation.copy_prompts(theirs, max_new_tokens)

    def extend(self, turns: Prompts, *, max_new_tokens: int = 0, progress: Progress | None = None) -> None:
        """Add a turn to each row of the conversation, for `decode` to answer. `max_new_tokens` sizes the
        buffers.

        What was generated belongs to the conversation, its last token, too. The turn attends over what the
        cache has kept. Its last token is the first step of a new refresh schedule: it scores, and then each
        row is evicted to the budget that its prompt gave it, or with `after="none"` not at all. Raises
        ValueError as `generate` does, and before any prompt.
        """
        rows = to_rows(turns, self.model.config.vocab_size, what="turn")
        conversation, state = self._current(), self.batch
        lengths = state.position_B.tolist()
        if len(rows) != len(lengths):
            raise ValueError(f"{len(rows)} turns for a conversation of {len(lengths)} rows")
        for row, token, fed in zip(rows, state.token_B.tolist(), state.fed_B.tolist(), strict=True):
            if not fed:
                row.insert(0, token)
        totals = [n + len(row) for n, row in zip(lengths, rows, strict=True)]
        check_positions(totals, max_new_tokens, self.model.config.max_positions, self._runtime.drafted)
        self._runtime.buffers.check_place(self.model)
        self._latest = None
        with self._whole():
            conversation.read_turn(rows, max_new_tokens, progress)

    def decode(
        self,
        max_new_tokens: int,
        *,
        sampling: Sampling = _GREEDY,
        eos_token_ids: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> Generation:
        """Answer the conversation, or go on with an answer that ended by its length. Raises as `generate`
        does."""
        tokens: list[list[int]] = [[] for _ in self.stats.prompt_tokens]
        for step in self._tokens(max_new_tokens, sampling, eos_token_ids, stop, self._read_every(stop)):
            for row, token in zip(tokens, step, strict=True):
                if token != NO_TOKEN:
                    row.append(token)
        return Generation(tokens, self._current().finish_reasons(), copy.deepcopy(self.stats))

    def recording(self) -> Recording:
        """What the answer's decode steps saw. Raises ValueError for a decoder that does not record."""
        buffers = self._runtime.buffers
        if not buffers.recorded_steps:
            raise ValueError("nothing is recorded: make the Decoder with record=")
        recorder = buffers.recorder or buffers.recorder_for(self._current().cache)
        assert recorder is not None
        return recorder.recording()

    def save(self, path: str | Path) -> None:
        """Write the conversation to a safetensors file, from which `load` goes on exactly. Raises ValueError
        for a model on several ranks, none of which has all of it."""
        saving.save(self._current(), path)

    def load(self, path: str | Path) -> None:
        """Take over a conversation that `save` wrote. Raises ValueError where it is another model's or
        rule's."""
        state, tensors = saving.read(self._runtime, path)
        self._forget()
        self._conversation = saving.restore(self._runtime, state, tensors)

    def _begin(self, lengths: list[int], max_new_tokens: int) -> Conversation:
        """Start a conversation with room for prompts of these lengths, once nothing speaks against it."""
        buffers, config = self._runtime.buffers, self.model.config
        budgets = Budgets(self.eviction, lengths, config.num_layers)
        drafted = self._runtime.drafted if budgets.overfull else 0
        # A draft follows the answer's first token.
        check_positions(lengths, max_new_tokens, config.max_positions, drafted + 1 if drafted else 0)
        slots, longest = budgets.decode_slots(max(max_new_tokens, drafted)), max(lengths)
        buffers.check_place(self.model)
        prompt_slots = bucket(longest + drafted + 1) if budgets.overfull else 0
        buffers.require(len(lengths), prompt_slots, slots, min(longest, self._runtime.prefill.chunk))
        self._forget()
        self._conversation = Conversation.begin(self._runtime, lengths, budgets, slots)
        return self._conversation

    def _tokens(
        self,
        max_new_tokens: int,
        sampling: Sampling,
        eos_token_ids: Sequence[int] | None,
        stop: Stop | None,
        read_every: int,
    ) -> Iterator[list[int]]:
        """Those of an answer, step by step. However soon it ends, it leaves the cache evicted to budget."""
        conversation = self._current()
        self._runtime.buffers.check_place(self.model)
        eos = self._check_options(self.stats.batch, max_new_tokens, sampling, eos_token_ids)
        check_positions(self.batch.position_B.tolist(), max_new_tokens, self.model.config.max_positions)
        self._latest = answer = GenerationLoop(conversation, max_new_tokens, sampling, eos, stop, read_every)
        steps = answer.tokens()
        try:
            while True:
                with self._whole():
                    tokens = next(steps, None)
                if tokens is None:
                    return
                yield tokens
                if self._latest is not answer:
                    raise ValueError("this answer's conversation has gone on without it")
        finally:
            if self._latest is answer:
                with self._whole():
                    answer.finish()

    def _read_every(self, stop: Stop | None) -> int:
        return 1 if stop is not None or self.model.device.type == "cpu" else READ_EVERY

    def _check_options(
        self, rows: int, max_new_tokens: int, sampling: Sampling, eos_token_ids: Sequence[int] | None
    ) -> Sequence[int]:
        """Raise ValueError for options that cannot be; the ids that end a row."""
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        sampling.seeds(rows)
        eos = self.model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        if len(eos) > MAX_EOS_IDS:
            raise ValueError(f"{len(eos)} end-of-sequence ids; at most {MAX_EOS_IDS} are supported")
        return eos

    def _current(self) -> Conversation:
        if self._conversation is None:
            raise ValueError("no conversation yet: call generate, stream or prefill first")
        return self._conversation

    def _forget(self) -> None:
        self.graphs.drop_captures()
        if self._runtime.buffers.recorder is not None:
            self._runtime.buffers.recorder.start()
        self._conversation = self._latest = None

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A change of the conversation. One that is broken off, by Ctrl-C or an error, leaves the cache
        between two states: forget it all."""
        try:
            with torch.no_grad():
                yield
        except BaseException:
            self._forget()
            raise
