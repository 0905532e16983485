"""Prefill, evict, decode: the public interface.

Shape letters: B batch, T query tokens, V vocabulary, N slots.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import saved
from .aggregation import Aggregation
from .attention import choose_backend
from .budgets import Budgets, settle
from .buffers import Buffers
from .cache import SlotCache, bucket
from .config import EvictionConfig
from .expected_attention import check_rotary
from .experimental import AdaptiveAlpha
from .graphs import Graphs, check_ties
from .learned import load_scorer
from .prefill import Prefill, Progress
from .prompts import Prompts, check_positions, count_rows, is_single, to_rows
from .protocol import LanguageModel
from .reconstruction import reconstruct
from .recording import Recorder, Recording
from .results import FinishReason, Generation, Stats
from .rows import MAX_EOS_IDS, NO_TOKEN, READ_EVERY, Rows
from .sampling import Sampling
from .steps import Method, decode_step, evicting_step

Stop = Callable[[int, list[int]], bool]
"""Called with a row and the tokens of its answer so far; True ends the row."""

_GREEDY = Sampling()


class Step(NamedTuple):
    """What a step did beside choosing a token."""

    decoded: bool
    """It fed a token; else the logits were there already."""
    refreshed: bool
    timed: bool
    """Its time is decoding, and not compilation."""


class Decoder:
    """Decodes a model while keeping no more of each row's KV cache than its budget.

    One conversation at a time: `generate` and `stream` start a new one, `extend` adds a turn to it, `decode`
    goes on with it, `save` and `load` carry it over. Buffers and graphs stay for the next conversation, which
    compiles nothing where its shapes fit theirs.

    * `model`: offers `model(tokens_BT, positions_BT, cache) -> hidden_BTE`, `model.head(hidden) -> logits`,
      `model.dtype`, `model.device` and sizes in `model.config`, as `models.Transformer` does.
    * `eviction`: the rule; None keeps every token.
    * `compile`: run the decode step as compiled graphs; without, the same functions run eagerly.
    * `attention`: "dense", "flex", or "auto" for the faster one on the model's device.
    * `prefill_chunk`: tokens of a prompt that go through the model at a time.
    * `repeat_prefix`: token ids of an instruction that goes before the repetitions of scorer
      "reconstruction".
    * `record`: decode steps of an answer to record for `recording`.
    * `on_compile`: called before a graph is compiled, which takes seconds, with what it is for.
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
        record: int = 0,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        if isinstance(record, bool) or not isinstance(record, int) or record < 0:
            raise ValueError(f"record must be a whole number of steps, got {record!r}")
        if record and (eviction is None or not eviction.scores_one_set):
            raise ValueError("record needs a rule that scores, for one set of all layers (scope='shared')")
        if repeat_prefix:
            if eviction is None or eviction.scorer != "reconstruction":
                raise ValueError("repeat_prefix has no effect without scorer='reconstruction'")
            to_rows(list(repeat_prefix), model.config.vocab_size, what="repeat_prefix")
        if compile and isinstance(model, torch.nn.Module):
            check_ties(model)
        self.model, self.eviction = model, eviction
        self._repeat_prefix = tuple(repeat_prefix)
        backend = choose_backend(attention, model.device, model.dtype, compile)
        self.method = Method(eviction, backend, tuple(dict.fromkeys(model.config.windows)))
        self.aggregation: Aggregation | None = None
        if eviction is not None:
            dtype, device = torch.promote_types(model.dtype, torch.float32), model.device
            learned = None
            if eviction.scorer_file is not None:
                learned = load_scorer(eviction.scorer_file, model.config, device=device, dtype=dtype)
            if eviction.scorer == "expected_attention":
                check_rotary(model)
            self.aggregation = Aggregation(eviction, model.config.num_layers, dtype, device, learned)
        self.graphs = Graphs(compile, model.device, on_compile)
        self.buffers = Buffers(model, "shared" if eviction is None else eviction.scope)
        self._prefill = Prefill(model, self.method, self.graphs, prefill_chunk)
        self._record = max(record, eviction.warm_up) if isinstance(eviction, AdaptiveAlpha) else record
        self._recorder: Recorder | None = None
        self._rows_by_batch: dict[int, Rows] = {}
        self.rows: Rows
        self.cache: SlotCache | None
        self._tokens: list[list[int]] = []
        self._logits_BV: Tensor | None = None
        self._forget()

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
        for tokens in self._answer(max_new_tokens, sampling, eos_token_ids, stop, read_every=1):
            yield tokens[0] if single else [None if token == NO_TOKEN else token for token in tokens]

    @torch.no_grad()
    def prefill(self, prompts: Prompts, *, max_new_tokens: int = 0, progress: Progress | None = None) -> None:
        """Start a conversation with `prompts` without answering yet. `max_new_tokens` sizes the buffers for
        `decode`. Raises as `generate` does."""
        rows = to_rows(prompts, self.model.config.vocab_size)
        self._begin([len(row) for row in rows], max_new_tokens)
        with self._whole():
            self._enter(rows, progress)
            if self._evicts_prompt:
                self._evict_prompt(rows, max_new_tokens)

    @torch.no_grad()
    def take_prompt(self, source: Decoder, *, max_new_tokens: int = 0) -> None:
        """Start a conversation with the prompts that another decoder of the same model has prefilled, by
        copying their K and V: one prefill then serves several rules. Raises ValueError where `source` has
        evicted of them or has begun to answer."""
        theirs = source._conversation()
        if source is self:
            raise ValueError("a decoder cannot take a prompt over from itself")
        if source.model is not self.model:
            raise ValueError("the prompt belongs to another model")
        lengths = source.stats.prompt_tokens
        if source._logits_BV is None or theirs.mean_B.tolist() != lengths:
            raise ValueError("only a prompt of which nothing was evicted or answered can be taken over")
        self._begin(lengths, max_new_tokens)
        with self._whole():
            with self._timed("prefill"):
                self._conversation().copy_prompt(theirs, max(lengths))
                self.rows.position_B.copy_(source.rows.position_B)
                self._logits_BV, self._tokens = source._logits_BV.clone(), source._tokens
            if self._evicts_prompt:
                self._evict_prompt(self._tokens, max_new_tokens)

    def _begin(self, lengths: list[int], max_new_tokens: int) -> None:
        """Make the buffers for a conversation that begins with prompts of these lengths."""
        batch, longest = len(lengths), max(lengths)
        check_positions(lengths, max_new_tokens, self.model.config.max_positions)
        budgets = Budgets(self.eviction, lengths, self.model.config.num_layers)
        if isinstance(self.eviction, AdaptiveAlpha) and batch > 1:
            raise ValueError(f"an adaptive alpha is one row's: {batch} prompts cannot share it")
        slots = budgets.decode_slots(max_new_tokens)
        self._check_model()
        prompt_slots = bucket(longest + 1) if budgets.overfull else 0
        self.buffers.require(batch, prompt_slots, slots, min(longest, self._prefill.chunk))

        self._forget()
        with self._whole():
            decode_cache = self.buffers.decode_cache(batch, slots)
            self.cache = self.buffers.prompt_cache(batch, longest) if budgets.overfull else decode_cache
            self.cache.allocate()
            self.cache.clear()
            for table, of_rows in zip(self.cache.tables, budgets.tables, strict=False):
                table.budget_BX.copy_(torch.tensor(of_rows)[:, None])
            self._overfull = budgets.overfull
            self.rows = self._rows_for(batch)
            self.rows.start(lengths, budgets.protection)
            self.stats = Stats(
                lengths, [None if self.eviction is None else budget for budget in budgets.rows]
            )

    @torch.no_grad()
    def extend(self, turns: Prompts, *, max_new_tokens: int = 0, progress: Progress | None = None) -> None:
        """Add a turn to each row of the conversation, for `decode` to answer. `max_new_tokens` sizes the
        buffers.

        What was generated belongs to the conversation, its last token, too. The turn attends over what the
        cache has kept. Its last token is the first step of a new refresh schedule: it scores, and then each
        row is evicted to the budget that its prompt gave it, or with `after="none"` not at all. Raises
        ValueError as `generate` does, and before any prompt.
        """
        rows = to_rows(turns, self.model.config.vocab_size, what="turn")
        cache = self._conversation()
        counts, lengths = cache.most_B.tolist(), self.rows.position_B.tolist()
        if len(rows) != len(counts):
            raise ValueError(f"{len(rows)} turns for a conversation of {len(counts)} rows")
        for row, token, fed in zip(rows, self.rows.token_B.tolist(), self.rows.fed_B.tolist(), strict=True):
            if not fed:
                row.insert(0, token)
        totals = [n + len(row) for n, row in zip(lengths, rows, strict=True)]
        check_positions(totals, max_new_tokens, self.model.config.max_positions)
        self._check_model()
        longest = max(n + len(row) for n, row in zip(counts, rows, strict=True))
        with self._whole():
            self._take_turn(rows, longest, max_new_tokens, progress)

    def _take_turn(
        self, rows: list[list[int]], longest: int, max_new_tokens: int, progress: Progress | None
    ) -> None:
        with self._timed("prefill"):
            self._move_to(self.buffers.prompt_cache(len(rows), longest + max_new_tokens))
        self.rows.finished_B.fill_(False)
        self._stopped.clear()
        self._turn = object()
        self._turn_step = 0
        if self._warming_up and self._recorder is not None:
            self._recorder.start()
        if self.eviction is None or self._evicts_prompt:
            self._enter(rows, progress)
            if self._evicts_prompt:
                self._evict_prompt(rows, max_new_tokens)
            return
        if any(len(row) > 1 for row in rows):
            self._enter([row[:-1] for row in rows], progress)
        else:
            self._tokens = [[] for _ in rows]
        self.rows.token_B.copy_(torch.tensor([row[-1] for row in rows]))
        self._evict_to_budget(max_new_tokens)

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
        for step in self._answer(max_new_tokens, sampling, eos_token_ids, stop, self._read_every(stop)):
            for row, token in zip(tokens, step, strict=True):
                if token != NO_TOKEN:
                    row.append(token)
        return Generation(tokens, self._finish_reasons(), copy.deepcopy(self.stats))

    def save(self, path: str | Path) -> None:
        """Write the conversation to a safetensors file, from which `load` goes on exactly."""
        saved.save(self, path)

    def load(self, path: str | Path) -> None:
        """Take over a conversation that `save` wrote. Raises ValueError where it is another model's or
        rule's."""
        saved.load(self, path)

    def _forget(self) -> None:
        self.graphs.forget_recordings()
        self.cache = None
        self.stats = Stats([], [])
        self._overfull = False  # the cache holds whole prompts, which the next step evicts to budget
        self._logits_BV = None  # of the last token fed, where none has been chosen from them yet
        self._tokens = []  # of each row's prompt or turn, as far as they were entered
        self._turn_step = 0  # decode steps of this turn: the refresh schedule's t
        self._turn = object()  # whose answer a stream is
        if self._recorder is not None:
            self._recorder.start()
        self._warming_up = isinstance(self.eviction, AdaptiveAlpha)  # alpha has yet to be chosen
        if isinstance(self.eviction, AdaptiveAlpha):
            self._smooth(self.eviction.alpha)
        self._stopped: set[int] = set()  # rows that `stop` has ended

    def _conversation(self) -> SlotCache:
        if self.cache is None:
            raise ValueError("no conversation yet: call generate, stream or prefill first")
        return self.cache

    def _rows_for(self, batch: int) -> Rows:
        if batch not in self._rows_by_batch:
            self._rows_by_batch[batch] = Rows(batch, self.model.device)
        return self._rows_by_batch[batch]

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

    def _enter(self, rows: list[list[int]], progress: Progress | None) -> None:
        """Put tokens behind those in the cache, which holds each row's oldest first; keeps the last one's
        logits."""
        cache = self._conversation()
        with self._timed("prefill"):
            # Behind the fullest set of each row: every set takes them at the same slots.
            slots, positions = cache.most_B.tolist(), self.rows.position_B.tolist()
            hidden_BE = self._prefill.enter(cache, rows, slots, positions, progress)
            self.rows.position_B.add_(torch.tensor([len(row) for row in rows], device=cache.device))
            self.rows.fed_B.fill_(True)
            self._logits_BV = self.model.head(hidden_BE)
            self._tokens = rows

    def _move_to(self, target: SlotCache, keep_BXN: Sequence[Tensor] | None = None) -> None:
        """Go on in another cache, with all tokens or those marked. The decode cache alone keeps its
        memory."""
        cache = self._conversation()
        keep_BXN = cache.everything() if keep_BXN is None else keep_BXN
        self.graphs.forget_recordings()  # of steps in the cache that is left, which they would keep alive
        target.take_from(cache, keep_BXN, release=not self.buffers.is_decode_cache(cache))
        self.cache = target

    @property
    def _evicts_prompt(self) -> bool:
        """Whether a prompt is evicted before the first decode step."""
        return self.eviction is not None and self.eviction.evict_at == "prompt"

    @property
    def _first_step_is_due(self) -> bool:
        """Whether the next step is the first one of a turn, in which its prompt is scored and evicted. A
        prompt within its budget takes it as well, so that no row depends on how long its neighbours are."""
        if self.eviction is None or self._evicts_prompt or self._turn_step > 0:
            return False
        return self._overfull or not bool(self.rows.finished_B.all())

    def _evict_prompt(self, rows: list[list[int]], new_tokens: int) -> None:
        """Score prompts, or turns, that have just been entered, and evict them to budget before any decode
        step."""
        eviction, aggregation = self.eviction, self.aggregation
        assert eviction is not None
        assert aggregation is not None
        if eviction.scorer == "reconstruction":
            sources = (self.model, self._conversation(), self.rows, aggregation, rows)
            with self._timed("first_step"):
                reconstruct(*sources, prefix=self._repeat_prefix, sinks=eviction.sinks)
        self._evict_to_budget(new_tokens, new=False)

    def _evict_to_budget(self, new_tokens: int = 0, *, new: bool = True) -> None:
        """Score, evict down to budget, and move to the decode cache. With `new` this is the first step of a
        turn, and feeds each row's token."""
        assert self.eviction is not None
        cache = self._conversation()
        with self._timed("first_step"):
            before_BW = self._before(self.eviction.window)
            end_slot = cache.filled + new
            scoring = self.aggregation if self.eviction.scores else None
            stays = self.buffers.is_decode_cache(cache)  # else its slots are not those of later steps
            recorder = self._recorder_for(cache) if stays and new else None
            state = (self.model, cache, self.rows, self.method, scoring, before_BW, recorder)
            logits_BV, keep_BXN = evicting_step(*state, new=new, end_slot=end_slot)
            settle(self.eviction, cache.tables, keep_BXN)
            if stays:
                cache.keep(keep_BXN)
            else:
                slots = cache.slots_for(new_tokens, keep_BXN)
                self._move_to(self.buffers.decode_cache(self.stats.batch, slots), keep_BXN)
        self._logits_BV = self._logits_BV if logits_BV is None else logits_BV
        self._overfull = False
        self._turn_step += new
        self.stats.refreshes += scoring is not None

    def _before(self, window: int) -> Tensor:
        """The last `window` tokens of each row's prompt or turn, [B, W], -1 before the first of a shorter
        one."""
        rows = [row[max(0, len(row) - window) :] for row in self._tokens]
        longest = max(map(len, rows))
        padded = [[-1] * (longest - len(row)) + row for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.model.device).view(len(rows), longest)

    def _answer(
        self,
        max_new_tokens: int,
        sampling: Sampling,
        eos_token_ids: Sequence[int] | None,
        stop: Stop | None,
        read_every: int,
    ) -> Iterator[list[int]]:
        """Decode, one list of tokens a step, `NO_TOKEN` for a row that has ended. Reads them from the device
        every `read_every` steps. However soon it ends, it leaves the cache evicted to budget."""
        cache, rows = self._conversation(), self.rows
        self._check_model()
        eos = self._check_options(self.stats.batch, max_new_tokens, sampling, eos_token_ids)
        check_positions(rows.position_B.tolist(), max_new_tokens, self.model.config.max_positions)
        rows.configure(sampling, eos, self.model.config.vocab_size)
        slots = cache.slots_for(max_new_tokens)
        with torch.no_grad():
            if not self._overfull and cache.shape.slots < slots:
                self._move_to(self.buffers.decode_cache(self.stats.batch, slots))
        self._turn = turn = object()
        steps = self._read(self._steps(max_new_tokens, sampling.greedy, read_every), stop)
        try:
            while True:
                with self._whole():
                    tokens = next(steps, None)
                if tokens is None:
                    break
                yield tokens
                if self._turn is not turn:
                    raise ValueError("this answer's conversation has gone on without it")
        except GeneratorExit:
            if self._turn is turn:
                self._settle(max_new_tokens)
            raise
        with self._whole():
            self._settle(max_new_tokens)

    def _read(self, steps: Iterator[list[Step]], stop: Stop | None) -> Iterator[list[int]]:
        answer: list[list[int]] = [[] for _ in range(self.stats.batch)]
        for unread in steps:
            with self._timed("decode"):
                history = self.rows.read(len(unread))
            for index, (step, tokens) in enumerate(zip(unread, history, strict=True)):
                if all(token == NO_TOKEN for token in tokens):
                    self._uncount(unread[index:])
                    return
                if step.timed:
                    self.stats.timed_tokens += sum(token != NO_TOKEN for token in tokens)
                self._end_rows(answer, tokens, stop)
                yield tokens

    @torch.no_grad()
    def _settle(self, new_tokens: int) -> None:
        """After an answer. One of a single token has not taken the first step, in which its prompt is scored
        and evicted; it is taken here, so that no cache stays overfull."""
        if self._logits_BV is None and self._first_step_is_due:
            self._evict_to_budget(new_tokens)
        self._finish_stats()

    @torch.no_grad()
    def _steps(self, max_new_tokens: int, greedy: bool, read_every: int) -> Iterator[list[Step]]:
        """Run the steps of an answer; yields those whose tokens are to be read now."""
        unread: list[Step] = []
        if bool(self.rows.finished_B.all()):
            return
        for index in range(max_new_tokens):
            if self._logits_BV is None and self._first_step_is_due:
                self._evict_to_budget(max_new_tokens)
            if self._logits_BV is not None:
                self.rows.choose(self._logits_BV, greedy=greedy)
                self._logits_BV = None
                unread.append(Step(decoded=False, refreshed=False, timed=False))
            else:
                unread.append(self._decode_step(greedy))
            if len(unread) == read_every or index == max_new_tokens - 1:
                yield unread
                unread = []
                if bool(self.rows.finished_B.all()):
                    return

    def _decode_step(self, greedy: bool) -> Step:
        cache, compiled = self._conversation(), self.graphs.stats.compiled
        self._turn_step += 1
        refresh = self.eviction is not None and self.eviction.refreshes_at(self._turn_step)
        with self._timed("decode"):
            self.graphs.run(
                ("refresh step" if refresh else "decode step", cache.shape, greedy),
                decode_step,
                self.model,
                cache,
                self.rows,
                self.method,
                self.aggregation,
                self._recorder_for(cache),
                refresh=refresh,
                greedy=greedy,
            )
        self.stats.decode_steps += 1
        self.stats.refreshes += refresh
        self._adapt()
        return Step(decoded=True, refreshed=refresh, timed=self.graphs.stats.compiled == compiled)

    def _adapt(self) -> None:
        """Choose alpha at the end of a warm-up: of steps in one cache, since slots move from one to the
        next."""
        if not self._warming_up or not isinstance(self.eviction, AdaptiveAlpha):
            return
        if self._turn_step <= self.eviction.warm_up:
            return
        recording, budget = self.recording(), self.stats.budgets[0]
        assert budget is not None
        if len(recording.newest_TB) >= self.eviction.warm_up:
            self._smooth(self.eviction.choose(recording, budget))
            self._warming_up = False

    def _smooth(self, alpha: float | None) -> None:
        assert self.aggregation is not None
        assert alpha is not None
        self.aggregation.smooth(alpha)

    def _uncount(self, steps: list[Step]) -> None:
        """Take back from the counts the last steps, which ran after every row had ended and changed
        nothing."""
        for step in steps:
            self.stats.decode_steps -= step.decoded
            self.stats.refreshes -= step.refreshed
            self._turn_step -= step.decoded

    def _end_rows(self, answer: list[list[int]], tokens: list[int], stop: Stop | None) -> None:
        """Append a step's tokens to the rows' answers, and end those rows where `stop` says so."""
        for row, token in enumerate(tokens):
            if token == NO_TOKEN:
                continue
            answer[row].append(token)
            if stop is not None and stop(row, answer[row]):
                self.rows.finished_B[row] = True
                self._stopped.add(row)

    def _finish_reasons(self) -> list[FinishReason]:
        finished = self.rows.finished_B.tolist()
        return [
            "stop" if row in self._stopped else "eos" if ended else "length"
            for row, ended in enumerate(finished)
        ]

    def _finish_stats(self) -> None:
        cache, stats = self._conversation(), self.stats
        stats.sequence_tokens = self.rows.position_B.tolist()
        stats.kept_tokens = [int(n) if n.is_integer() else n for n in cache.mean_B.tolist()]
        stats.cache_bytes = cache.allocated_bytes
        full = self.buffers.shape(stats.batch, bucket(max(stats.sequence_tokens) + 1))
        stats.full_cache_bytes = full.nbytes(cache.dtype)
        stats.graphs = replace(self.graphs.stats)

    def recording(self) -> Recording:
        """What the answer's decode steps saw. Raises ValueError for a decoder that does not record."""
        if not self._record:
            raise ValueError("nothing is recorded: make the Decoder with record=")
        recorder = self._recorder or self._recorder_for(self._conversation())
        assert recorder is not None
        return recorder.recording()

    def _recorder_for(self, cache: SlotCache) -> Recorder | None:
        shape = cache.shape
        if self._record and (
            self._recorder is None or self._recorder.position_TBN.shape[1:] != (shape.batch, shape.slots)
        ):
            self._recorder = Recorder(self._record, shape.layers, shape.batch, shape.slots, cache.device)
        return self._recorder

    def _check_model(self) -> None:
        """Raise ValueError where the model has been moved: graphs and buffers are made for where it was."""
        was, now = (self.buffers.dtype, self.buffers.device), (self.model.dtype, self.model.device)
        if was != now:
            raise ValueError(
                f"the model was {was[0]} on {was[1]} and is {now[0]} on {now[1]}: make a new Decoder"
            )

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A step that is broken off, by Ctrl-C or an error, leaves the cache between two states: forget it
        all."""
        try:
            yield
        except BaseException:
            self._forget()
            raise

    @contextmanager
    def _timed(self, part: Literal["prefill", "first_step", "decode"]) -> Iterator[None]:
        """Add the time of a block to the stats, without what it spent on compiling."""
        start, compiled = time.perf_counter(), self.graphs.stats.seconds
        yield
        if part != "decode" and self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        compiled = self.graphs.stats.seconds - compiled
        self.stats.seconds.compile += compiled
        elapsed = time.perf_counter() - start - compiled
        setattr(self.stats.seconds, part, getattr(self.stats.seconds, part) + elapsed)
