"""The public interface: prefill, evict, decode."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from .cache import memory
from .cache.budgets import Budgets
from .cache.slot_cache import SlotCache
from .compiling.graphs import Graphs
from .config import EvictionConfig
from .decoding import saving
from .decoding.admission import Admission, check_options
from .decoding.batch import NO_TOKEN, READ_EVERY, BatchState
from .decoding.decoding_rule import DecodingRule
from .decoding.exclusive import Exclusive
from .decoding.generation import Conversation, GenerationLoop, Stop
from .decoding.prefill import Progress
from .decoding.recording import Recording
from .decoding.runtime import Runtime
from .model import LanguageModel
from .requests.prompts import Prompts, is_single, to_rows
from .requests.results import Generation, Stats
from .requests.sampling import Sampling

log = logging.getLogger(__name__)
_GREEDY = Sampling()


class Decoder:
    """Decodes a model while keeping no more of each row's KV cache than its budget.

    One conversation at a time: `generate` and `stream` start a new one, `extend` adds a turn to it, `decode`
    goes on with it, `save` and `load` carry it over. Buffers and graphs stay for the next conversation, which
    compiles nothing where its shapes fit theirs.

    Threads may share a decoder: each call runs alone, the others wait. An answer that is streamed ends with
    ValueError once another call has started a new conversation. Decoders of one model do not wait for each
    other, but where graphs are compiled.

    * `model`: offers what `inertiakv.model.LanguageModel` says, as `inertiakv.models.Transformer` does.
    * `eviction`: the rule; None keeps every token.
    * `compile`: run the decode step as compiled graphs; without, the same functions run eagerly. None:
      compiled where this machine can, and else a line of the log says what it lacks.
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
        compile: bool | None = None,
        attention: str = "auto",
        prefill_chunk: int = 2048,
        repeat_prefix: Sequence[int] = (),
        on_compile: Callable[[str], None] | None = None,
        on_draft: Callable[[int, int], None] | None = None,
        record: int = 0,
        check_ranks: bool = False,
    ) -> None:
        self.model = model
        self._exclusive = Exclusive()
        with torch.inference_mode(False):  # whose tensors could not be changed outside of it
            self._runtime = Runtime(
                model,
                eviction,
                compile=compile,
                attention=attention,
                prefill_chunk=prefill_chunk,
                repeat_prefix=repeat_prefix,
                on_compile=on_compile,
                on_draft=on_draft,
                record=record,
                check_ranks=check_ranks,
            )
        self._admission = Admission(self._runtime)
        self._conversation: Conversation | None = None
        self._latest: GenerationLoop | None = None  # the answer that has not been finished

    def use(self, eviction: EvictionConfig | None) -> None:
        """Go by another rule from the next conversation on; the one there is is forgotten.

        Rules that differ in their budget, smoothing, refreshes, or in how they evict a prompt share their
        graphs: a sweep compiles nothing anew where shapes are the same. Raises ValueError for a rule that
        does not go with the model or with the decoder's other options.
        """
        with self._exclusive, torch.inference_mode(False):
            self._runtime.use(eviction)
            self._forget()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Decoder cannot be copied or pickled: make another one of its model")

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
        self._finish_if_idle()
        return Stats([], []) if self._conversation is None else self._conversation.stats

    @property
    def cache(self) -> SlotCache | None:
        self._finish_if_idle()
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
        rows = to_rows(prompts, self.model.config.vocab_size)
        check_options(len(rows), max_new_tokens, sampling, eos_token_ids, stop)
        with self._exclusive:
            self._prefill(rows, max_new_tokens, progress, sampling)
            return self._decode(max_new_tokens, sampling, eos_token_ids, stop)

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
        has ended. `decoder.stats` tells the rest afterwards.

        Errors that `generate` raises before any work come at the call; the prompt is read at the first
        token."""
        rows = to_rows(prompts, self.model.config.vocab_size)
        check_options(len(rows), max_new_tokens, sampling, eos_token_ids, stop)
        with self._exclusive:
            self._admission.admit(rows, max_new_tokens, sampling, self._conversation)
        single = is_single(prompts)
        return self._stream(rows, single, max_new_tokens, sampling, eos_token_ids, stop, progress)

    def _stream(
        self,
        rows: list[list[int]],
        single: bool,
        max_new_tokens: int,
        sampling: Sampling,
        eos_token_ids: Sequence[int] | None,
        stop: Stop | None,
        progress: Progress | None,
    ) -> Iterator[int | list[int | None]]:
        with self._exclusive:
            self._prefill(rows, max_new_tokens, progress, sampling)
            answer = self._answer(max_new_tokens, sampling, eos_token_ids, stop, read_every=1)
        yield from self._steps(answer, single)

    def stream_answer(
        self,
        max_new_tokens: int,
        *,
        sampling: Sampling = _GREEDY,
        eos_token_ids: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> Iterator[int | list[int | None]]:
        """As `decode`, token by token: an int where the conversation has one row, else a list with None where
        a row has ended."""
        with self._exclusive:
            self._admission.check_answer(self._current(), max_new_tokens, sampling, eos_token_ids, stop)
            answer = self._answer(max_new_tokens, sampling, eos_token_ids, stop, read_every=1)
        return self._steps(answer, answer.conversation.stats.batch == 1)

    def _steps(self, answer: GenerationLoop, single: bool) -> Iterator[int | list[int | None]]:
        steps = answer.tokens()
        while True:
            with self._exclusive:
                if self._latest is not answer:
                    raise ValueError("this answer's conversation has gone on without it")
                with self._whole():
                    tokens = next(steps, None)
                if tokens is None:
                    self._finish()
                    return
            # It may be left here. Then it is finished by the next call, and not while garbage is collected.
            yield tokens[0] if single else [None if token == NO_TOKEN else token for token in tokens]

    def prefill(self, prompts: Prompts, *, max_new_tokens: int = 0, progress: Progress | None = None) -> None:
        """Start a conversation with `prompts` without answering yet. `max_new_tokens` sizes the buffers for
        `decode`. Raises as `generate` does."""
        rows = to_rows(prompts, self.model.config.vocab_size)
        with self._exclusive:
            self._prefill(rows, max_new_tokens, progress)

    def _prefill(
        self,
        rows: list[list[int]],
        max_new_tokens: int,
        progress: Progress | None,
        sampling: Sampling = _GREEDY,
    ) -> None:
        budgets = self._admission.admit(rows, max_new_tokens, sampling, self._conversation)
        with self._whole():
            conversation = self._begin(budgets, max_new_tokens)
            conversation.read_prompts(rows, max_new_tokens, progress)
            conversation.complete_stats()

    def take_prompt(self, source: Decoder, *, max_new_tokens: int = 0) -> None:
        """Start a conversation with the prompts that another decoder of the same model has prefilled, by
        copying their K and V: one prefill then serves several rules. Raises as `generate` does, and
        ValueError where `source` has another model, has evicted of the prompts or has begun to answer."""
        if source is self:
            raise ValueError("a decoder cannot take a prompt over from itself")
        if source.model is not self.model:
            raise ValueError("the prompt belongs to another model")
        first, second = sorted((self, source), key=id)  # in one order everywhere: none waits for the other
        with first._exclusive, second._exclusive:
            theirs = source._current()
            lengths = theirs.stats.prompt_tokens
            if theirs.logits_BV is None or theirs.cache.mean_B.tolist() != lengths:
                raise ValueError("only a prompt of which nothing was evicted or answered can be taken over")
            rows = [range(length) for length in lengths]
            budgets = self._admission.admit(rows, max_new_tokens, _GREEDY, self._conversation)
            with self._whole():
                conversation = self._begin(budgets, max_new_tokens)
                conversation.copy_prompts(theirs, max_new_tokens)
                conversation.complete_stats()

    def extend(self, turns: Prompts, *, max_new_tokens: int = 0, progress: Progress | None = None) -> None:
        """Add a turn to each row of the conversation, for `decode` to answer. `max_new_tokens` sizes the
        buffers.

        What was generated belongs to the conversation, its last token, too. The turn attends over what the
        cache has kept. Its last token is the first step of a new refresh schedule: it scores, and then each
        row is evicted to the budget that its prompt gave it, or with `after="none"` not at all. Raises as
        `generate` does, and ValueError where there is no conversation.
        """
        rows = to_rows(turns, self.model.config.vocab_size, what="turn")
        with self._exclusive:
            self._finish()
            self._extend(rows, max_new_tokens, progress)

    def _extend(self, rows: list[list[int]], max_new_tokens: int, progress: Progress | None) -> None:
        conversation = self._current()
        state = conversation.batch
        lengths = state.position_B.tolist()
        if len(rows) != len(lengths):
            raise ValueError(f"{len(rows)} turns for a conversation of {len(lengths)} rows")
        for row, token, fed in zip(rows, state.token_B.tolist(), state.fed_B.tolist(), strict=True):
            if not fed:
                row.insert(0, token)
        totals = [n + len(row) for n, row in zip(lengths, rows, strict=True)]
        self._admission.admit_turn(conversation, rows, totals, max_new_tokens)
        self._latest = None
        with self._whole():
            conversation.read_turn(rows, max_new_tokens, progress)
            conversation.complete_stats()

    def decode(
        self,
        max_new_tokens: int,
        *,
        sampling: Sampling = _GREEDY,
        eos_token_ids: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> Generation:
        """Answer the conversation, or go on with an answer that ended by its length. Raises as `generate`
        does, and ValueError where there is no conversation."""
        with self._exclusive:
            self._admission.check_answer(self._current(), max_new_tokens, sampling, eos_token_ids, stop)
            return self._decode(max_new_tokens, sampling, eos_token_ids, stop)

    def _decode(
        self,
        max_new_tokens: int,
        sampling: Sampling,
        eos_token_ids: Sequence[int] | None,
        stop: Stop | None,
    ) -> Generation:
        answer = self._answer(max_new_tokens, sampling, eos_token_ids, stop, self._read_every(stop))
        conversation = answer.conversation
        tokens: list[list[int]] = [[] for _ in range(conversation.stats.batch)]
        with self._whole():
            for step in answer.tokens():
                for row, token in zip(tokens, step, strict=True):
                    if token != NO_TOKEN:
                        row.append(token)
        self._finish()
        out = Generation(tokens, conversation.finish_reasons(), copy.deepcopy(conversation.stats))
        for failure in out.failures():
            log.warning(failure)
        return out

    def recording(self) -> Recording:
        """What the answer's decode steps saw. Raises ValueError for a decoder that does not record."""
        buffers = self._runtime.buffers
        if not buffers.recorded_steps:
            raise ValueError("nothing is recorded: make the Decoder with record=")
        with self._exclusive:
            self._finish()
            recorder = buffers.recorder or buffers.recorder_for(self._current().cache)
            assert recorder is not None
            return recorder.recording()

    def save(self, path: str | Path) -> None:
        """Write the conversation to a safetensors file, from which `load` goes on exactly. Raises ValueError
        where there is no conversation and for a model on several ranks, none of which has all of it, and
        OSError where the file cannot be written."""
        with self._exclusive:
            self._finish()
            saving.save(self._current(), path)

    def load(self, path: str | Path) -> None:
        """Take over a conversation that `save` wrote. Raises FileNotFoundError where there is no file,
        ValueError where it is damaged, or another model's or rule's, and MemoryError where it does not fit.
        The conversation before it is forgotten once all of that is known to be right."""
        with self._exclusive, torch.inference_mode(False):
            state, tensors = saving.read(self._runtime, path)
            self._forget()
            with self._whole():
                self._conversation = saving.restore(self._runtime, state, tensors)

    def _begin(self, budgets: Budgets, max_new_tokens: int) -> Conversation:
        """Start a conversation with room for prompts of these budgets."""
        self._forget()
        self.graphs.follow(self.model)
        slots = self._admission.slots(budgets, max_new_tokens)
        self._conversation = Conversation.begin(self._runtime, budgets.lengths, budgets, slots)
        return self._conversation

    def _answer(
        self,
        max_new_tokens: int,
        sampling: Sampling,
        eos_token_ids: Sequence[int] | None,
        stop: Stop | None,
        read_every: int,
    ) -> GenerationLoop:
        """An answer to the conversation. However soon it is left, `_finish` evicts the cache to
        budget."""
        eos = self.model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        conversation = self._current()
        self.graphs.follow(self.model)
        self._latest = GenerationLoop(conversation, max_new_tokens, sampling, eos, stop, read_every)
        return self._latest

    def _finish(self) -> None:
        """Finish an answer, one that was left early, too."""
        if self._latest is not None:
            with self._whole():
                self._latest.finish()
                self._latest = None

    def _finish_if_idle(self) -> None:
        """Finish an answer that was left early, unless a call is going on: another thread's, or the one that
        has called the caller."""
        if self._latest is not None and not self._exclusive.is_held:
            with self._exclusive:
                self._finish()

    def _read_every(self, stop: Stop | None) -> int:
        return 1 if stop is not None or self.model.device.type == "cpu" else READ_EVERY

    def _current(self) -> Conversation:
        if self._conversation is None:
            raise ValueError("no conversation yet: call generate, stream or prefill first")
        return self._conversation

    def _forget(self) -> None:
        self.graphs.drop_captures()
        if self._runtime.buffers.recorder is not None:
            self._runtime.buffers.recorder.start()
        size = 0 if self._conversation is None else self._conversation.own_bytes
        self._conversation = self._latest = None
        memory.give_back(self.model.device, size)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A change of the conversation, in the same modes whatever the caller's are. One that is broken off,
        by Ctrl-C or an error, leaves the cache between two states: forget it all."""
        autocast = torch.autocast(self.model.device.type, enabled=False)
        try:
            with torch.inference_mode(False), torch.no_grad(), autocast:
                yield
        except BaseException:
            self._forget()
            raise
