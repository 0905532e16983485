"""One conversation: its state, and how prompts, turns and decode steps change it.

Shape letters: B batch, V vocabulary, W last tokens of a prompt, X retention sets, N slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ..cache.budgets import Budgets, settle
from ..cache.slot_cache import SlotCache
from ..config import EvictionConfig
from ..decoding.tensor_parallel import check_agreement
from ..requests.results import FinishReason, Stats
from ..requests.sampling import Sampling
from ..scoring.kvzip import reconstruct
from .batch import MAX_EOS_IDS, NO_TOKEN, BatchState
from .prefill import Progress
from .runtime import Runtime
from .steps import decode_step, evicting_step


@dataclass(eq=False)
class Conversation:
    """What a decoder knows of its prompts and all that followed. Broken off in the middle of any change, it
    is between two states and of no use."""

    engine: Runtime
    cache: SlotCache
    rows: BatchState
    stats: Stats
    overfull: bool  # the cache holds whole prompts, which the next step evicts to budget
    tokens: list[list[int]] = field(default_factory=list)  # of each row's prompt or turn, as far as entered
    logits_BV: Tensor | None = None  # of the last token fed, where none has been chosen from them yet
    turn_step: int = 0  # decode steps of this turn: the refresh schedule's t
    stopped: set[int] = field(default_factory=set)  # rows that the caller's `stop` has ended

    @classmethod
    def begin(cls, engine: Runtime, lengths: list[int], budgets: Budgets, slots: int) -> Conversation:
        """One that takes prompts of these lengths next, and is decoded in a cache of `slots`."""
        batch, buffers = len(lengths), engine.buffers
        cache = buffers.decode_cache(batch, slots)
        if budgets.overfull:
            cache = buffers.prompt_cache(batch, max(lengths) + engine.drafted)
        cache.allocate()
        cache.clear()
        for sets, of_rows in zip(cache.retention, budgets.by_layer, strict=False):
            sets.budget_BX.copy_(torch.tensor(of_rows)[:, None])
        rows = buffers.rows(batch)
        rows.start(lengths, budgets.protection)
        kept = [None if engine.method.eviction is None else budget for budget in budgets.rows]
        return cls(engine, cache, rows, Stats(lengths, kept), budgets.overfull)

    @property
    def eviction(self) -> EvictionConfig | None:
        return self.engine.method.eviction

    def read_prompts(self, rows: list[list[int]], new_tokens: int, progress: Progress | None) -> None:
        """Take in the prompts; `new_tokens` sizes the buffers of an answer."""
        self._enter(rows, progress)
        self._evict_prompt(new_tokens)

    def copy_prompts(self, source: Conversation, new_tokens: int) -> None:
        """Take in the prompts that another conversation has read, and neither evicted nor answered."""
        assert source.logits_BV is not None
        with self.timed("prefill"):
            self.cache.copy_prompt(source.cache, max(self.stats.prompt_tokens))
            self.rows.position_B.copy_(source.rows.position_B)
            self.logits_BV, self.tokens = source.logits_BV.clone(), source.tokens
        self._evict_prompt(new_tokens)

    def read_turn(self, rows: list[list[int]], new_tokens: int, progress: Progress | None) -> None:
        """Take in what follows in each row. Its last token is the first step of a new refresh schedule."""
        counts = self.cache.most_B.tolist()
        longest = max(n + len(row) for n, row in zip(counts, rows, strict=True))
        with self.timed("prefill"):
            room = max(new_tokens, self.engine.drafted)
            self._move_to(self.engine.buffers.prompt_cache(len(rows), longest + room))
        self.rows.finished_B.fill_(False)
        self.stopped.clear()
        self.turn_step = 0
        if self.eviction is None or self.eviction.evict_at == "prompt":
            self.read_prompts(rows, new_tokens, progress)
            return
        if any(len(row) > 1 for row in rows):
            self._enter([row[:-1] for row in rows], progress)
        else:
            self.tokens = [[] for _ in rows]
        self.rows.token_B.copy_(torch.tensor([row[-1] for row in rows]))
        self.evict_to_budget(new_tokens)

    def make_room(self, new_tokens: int) -> None:
        """Go on in a larger decode cache where this one has no slots for so many tokens more."""
        slots = self.cache.slots_for(new_tokens)
        if not self.overfull and self.cache.shape.slots < slots:
            self._move_to(self.engine.buffers.decode_cache(self.stats.batch, slots))

    @property
    def first_step_is_due(self) -> bool:
        """Whether the next step is the first one of a turn, in which its prompt is scored and evicted. A
        prompt within its budget takes it as well, so that no row depends on how long its neighbours are."""
        if self.logits_BV is not None or self.turn_step > 0:
            return False
        if self.eviction is None or self.eviction.evict_at == "prompt":
            return False
        return self.overfull or not bool(self.rows.finished_B.all())

    def evict_to_budget(self, new_tokens: int, *, new: bool = True) -> None:
        """Score, evict down to budget, and move to the decode cache. With `new` this is the first step of a
        turn, and feeds each row's token."""
        eviction = self.eviction
        assert eviction is not None
        with self.timed("first_step"):
            before_BW = self._before(eviction.window)
            draft_BD = before_BW[:, :0]
            if eviction.draft and new and bool(self.cache.overfull_B.any()):
                for number in range(1, eviction.drafts + 1):
                    if self.engine.on_draft is not None:
                        self.engine.on_draft(number, eviction.drafts)
                    draft_BD = self._draft(before_BW, draft_BD, new_tokens)
            logits_BV, keep_BXN = self._choose(before_BW, draft_BD, new=new)
            if self.engine.buffers.is_decode_cache(self.cache):
                self.cache.keep(keep_BXN)
            else:
                self._move_to(self._decode_cache(new_tokens, keep_BXN), keep_BXN)
        self.logits_BV = self.logits_BV if logits_BV is None else logits_BV
        self.overfull = False
        self.turn_step += new
        self.stats.refreshes += eviction.scores

    def _choose(
        self, before_BW: Tensor, draft_BD: Tensor, *, new: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The evicting step, and the budgets that hold after it."""
        engine, cache, eviction = self.engine, self.cache, self.eviction
        assert eviction is not None
        end_slot = cache.filled + new + draft_BD.shape[1]
        scoring = engine.aggregation if eviction.scores else None
        # In another cache slots are not those of later steps.
        recorded = new and engine.buffers.is_decode_cache(cache)
        recorder = engine.buffers.recorder_for(cache) if recorded else None
        state = (engine.model, cache, self.rows, engine.method, scoring, before_BW, draft_BD, recorder)
        logits_BV, keep_BXN = evicting_step(*state, new=new, end_slot=end_slot)
        settle(eviction, cache.retention, keep_BXN)
        return logits_BV, keep_BXN

    def _draft(self, before_BW: Tensor, former_BD: Tensor, new_tokens: int) -> Tensor:
        """The likeliest tokens after the pending one, had the prompt been evicted by its query and those of a
        former draft: [B, D], -1 from the end of a row's draft on, and in rows that are within their budget.
        All else stays as it is."""
        engine, rows, prompt = self.engine, self.rows, self.cache
        changing = nn.ModuleList((rows, *prompt.retention))
        state = {name: tensor.clone() for name, tensor in changing.state_dict().items()}
        overfull_B = prompt.overfull_B
        logits_BV, keep_BXN = self._choose(before_BW, former_BD, new=True)
        assert logits_BV is not None
        self.cache = self._decode_cache(new_tokens, keep_BXN)
        self.cache.take_from(prompt, keep_BXN, release=False)
        config = engine.model.config
        rows.configure(Sampling(), config.eos_token_ids[:MAX_EOS_IDS], config.vocab_size)
        drafted: list[Tensor] = []
        for step in range(1, engine.drafted + 1):
            active_B = overfull_B & ~rows.finished_B
            if step == 1:
                rows.choose(logits_BV, greedy=True)
            else:
                self._run(step, greedy=True)
            drafted.append(torch.where(active_B, rows.token_B, NO_TOKEN))
        changing.load_state_dict(state)
        self.cache = prompt
        return torch.stack(drafted, dim=1)

    def _decode_cache(self, new_tokens: int, keep_BXN: Sequence[Tensor]) -> SlotCache:
        """With room for the tokens marked, and `new_tokens` more or a draft."""
        slots = self.cache.slots_for(max(new_tokens, self.engine.drafted), keep_BXN)
        return self.engine.buffers.decode_cache(self.stats.batch, slots)

    def decode_step(self, greedy: bool) -> bool:
        """Feed each row's token, evict, and choose the next one. Returns whether its time is decoding, and
        not compilation."""
        stats, compiled = self.engine.graphs.stats, self.engine.graphs.stats.compiled
        self.turn_step += 1
        with self.timed("decode"):
            self.stats.refreshes += self._run(self.turn_step, greedy=greedy)
        self.stats.decode_steps += 1
        return stats.compiled == compiled

    def _run(self, step: int, *, greedy: bool) -> bool:
        """Decode step `step` of a turn. Returns whether it has refreshed the utilities."""
        engine, cache = self.engine, self.cache
        refresh = self.eviction is not None and self.eviction.refreshes_at(step)
        due = engine.due
        if due is not None:
            due.fill_(refresh)
        kind = "refresh step" if refresh and due is None else "decode step"
        aggregation = engine.aggregation if refresh or due is not None else None
        recorder = engine.buffers.recorder_for(cache)
        state = (engine.model, cache, self.rows, engine.method, aggregation, recorder, due)
        key = (kind, engine.form, cache.shape, greedy)
        engine.graphs.run(key, decode_step, *state, greedy=greedy)
        return refresh

    def check_ranks(self) -> None:
        """Where the decoder is to do so, see that all ranks have come to the same."""
        if self.engine.checks_ranks:
            tables = self.cache.retention if self.cache.shape.scope != "head" else ()
            check_agreement(self.engine.tp, self.rows.token_B, tables)

    def finish_reasons(self) -> list[FinishReason]:
        """Why each row of an answer has ended."""
        ended, stopped = self.rows.finished_B.tolist(), self.stopped
        return ["stop" if row in stopped else "eos" if end else "length" for row, end in enumerate(ended)]

    @contextmanager
    def timed(self, part: Literal["prefill", "first_step", "decode"]) -> Iterator[None]:
        """Add the time of a block to the stats, without what it spent on compiling."""
        graphs, device, seconds = self.engine.graphs.stats, self.engine.buffers.device, self.stats.seconds
        start, compiled = time.perf_counter(), graphs.seconds
        yield
        if part != "decode" and device.type == "cuda":
            torch.cuda.synchronize(device)
        compiled = graphs.seconds - compiled
        seconds.compile += compiled
        elapsed = time.perf_counter() - start - compiled
        setattr(seconds, part, getattr(seconds, part) + elapsed)

    def _enter(self, rows: list[list[int]], progress: Progress | None) -> None:
        """Put tokens behind those in the cache, which holds each row's oldest first; keeps the last one's
        logits."""
        cache = self.cache
        with self.timed("prefill"):
            # Behind the fullest set of each row: every set takes them at the same slots.
            slots, positions = cache.most_B.tolist(), self.rows.position_B.tolist()
            hidden_BE = self.engine.prefill.enter(cache, rows, slots, positions, progress)
            self.rows.position_B.add_(torch.tensor([len(row) for row in rows], device=cache.device))
            self.rows.fed_B.fill_(True)
            self.logits_BV = self.engine.model.head(hidden_BE)
            self.tokens = rows

    def _evict_prompt(self, new_tokens: int) -> None:
        """Where the rule says so, score prompts, or turns, that have just been entered, and evict them to
        budget before any decode step."""
        engine, eviction = self.engine, self.eviction
        if eviction is None or eviction.evict_at != "prompt":
            return
        if eviction.scorer == "reconstruction":
            assert engine.aggregation is not None
            sources = (engine.model, self.cache, self.rows, engine.aggregation, self.tokens)
            with self.timed("first_step"):
                reconstruct(*sources, prefix=engine.repeat_prefix, sinks=eviction.sinks)
        self.evict_to_budget(new_tokens, new=False)

    def _move_to(self, target: SlotCache, keep_BXN: Sequence[Tensor] | None = None) -> None:
        """Go on in another cache, with all tokens or those marked. The decode cache alone keeps its
        memory."""
        keep_BXN = self.cache.everything() if keep_BXN is None else keep_BXN
        # Recordings of steps in the cache that is left would keep it alive.
        self.engine.graphs.forget_recordings()
        target.take_from(self.cache, keep_BXN, release=not self.engine.buffers.is_decode_cache(self.cache))
        self.cache = target

    def _before(self, window: int) -> Tensor:
        """The last `window` tokens of each row's prompt or turn, [B, W], -1 before the first of a shorter
        one."""
        rows = [row[max(0, len(row) - window) :] for row in self.tokens]
        longest = max(map(len, rows))
        padded = [[-1] * (longest - len(row)) + row for row in rows]
        before = torch.tensor(padded, dtype=torch.int64, device=self.cache.device)
        return before.view(len(rows), longest)
