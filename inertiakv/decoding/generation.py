"""Generation: read prompts and turns, evict them, run decode steps and read their tokens.

Shape letters: B batch, W tokens before the new one, D drafted tokens, X retention sets, N slots, V
vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..cache import memory
from ..cache.budgets import Budgets, set_budgets_after_prompt
from ..cache.slot_cache import SlotCache, bucket
from ..requests.results import FinishReason, Stats
from ..requests.sampling import Sampling
from ..scoring.kvzip import reconstruct
from .batch import MAX_EOS_IDS, NO_TOKEN, BatchState
from .prefill import Progress
from .runtime import Runtime
from .steps import decode_step, evicting_step
from .tensor_parallel import check_agreement

Stop = Callable[[int, list[int]], bool]
"""Called with a row and the tokens of its answer so far; True ends the row."""


class Conversation:
    """What is cached of a batch, and where its turns stand. Broken off in the middle of any change, it is
    between two states and of no use."""

    def __init__(
        self,
        runtime: Runtime,
        cache: SlotCache,
        batch: BatchState,
        stats: Stats,
        overfull: bool,
        *,
        tokens: list[list[int]] | None = None,
        logits_BV: Tensor | None = None,
        turn_step: int = 0,
        stopped: set[int] | None = None,
    ) -> None:
        self.runtime, self.rule, self.eviction = runtime, runtime.rule, runtime.rule.config
        self.cache, self.batch, self.stats = cache, batch, stats
        self.turn_step = turn_step  # decode steps of this turn: the t of the refresh schedule
        self.overfull = overfull  # the cache holds whole prompts, which the next step evicts to budget
        self.tokens = tokens or []  # of each row's prompt or turn, as far as it was entered
        self.logits_BV = logits_BV  # of the last token fed, where none has been chosen from them yet
        self.stopped = stopped or set()  # rows that the caller's `stop` has ended

    @classmethod
    def begin(cls, runtime: Runtime, lengths: list[int], budgets: Budgets, slots: int) -> Conversation:
        """A conversation that takes prompts of these lengths next, and is decoded in a cache of `slots`."""
        rows, buffers = len(lengths), runtime.buffers
        cache = buffers.decode_cache(rows, slots)
        if budgets.overfull:
            cache = buffers.prompt_cache(rows, max(lengths) + runtime.drafted)
        cache.allocate()
        cache.clear()
        batch = buffers.batch_state(rows)
        batch.start(lengths, budgets.protection)
        kept = [None if runtime.rule.config is None else budget for budget in budgets.rows]
        budgets.enter(cache.retention)
        return cls(runtime, cache, batch, Stats(lengths, kept), budgets.overfull)

    # Prompts and turns.

    def read_prompts(self, rows: list[list[int]], new_tokens: int, progress: Progress | None) -> None:
        """Take in the prompts; `new_tokens` sizes the buffers of an answer."""
        self._read(rows, progress)
        self._evict_before_decoding(new_tokens)

    def copy_prompts(self, source: Conversation, new_tokens: int) -> None:
        """Take in the prompts that another conversation has read, and neither evicted nor answered."""
        assert source.logits_BV is not None
        with self.timed("prefill"):
            self.cache.copy_prompt(source.cache, max(self.stats.prompt_tokens))
            self.batch.position_B.copy_(source.batch.position_B)
            self.logits_BV, self.tokens = source.logits_BV.clone(), source.tokens
        self._evict_before_decoding(new_tokens)

    def read_turn(self, rows: list[list[int]], new_tokens: int, progress: Progress | None) -> None:
        """Take in what follows in each row. Its last token is the first step of a new refresh schedule."""
        with self.timed("prefill"):
            self.move_to(
                self.runtime.buffers.prompt_cache(len(rows), self.tokens_with_turn(rows, new_tokens))
            )
        self.batch.finished_B.fill_(False)
        self.batch.failed_B.fill_(False)
        self.stopped.clear()
        self.turn_step = 0
        if self.eviction is None or self.eviction.evict_at == "prompt":
            self.read_prompts(rows, new_tokens, progress)
            return
        if any(len(row) > 1 for row in rows):
            self._read([row[:-1] for row in rows], progress)
        else:
            self.tokens = [[] for _ in rows]
        self.batch.token_B.copy_(torch.tensor([row[-1] for row in rows]))
        self.evict_to_budget(new_tokens)

    def tokens_with_turn(self, rows: list[list[int]], new_tokens: int) -> int:
        """Tokens of the longest row with its turn, and what follows them in the same cache."""
        counts = self.cache.most_B.tolist()
        longest = max(n + len(row) for n, row in zip(counts, rows, strict=True))
        return longest + max(new_tokens, self.runtime.drafted)

    def _read(self, rows: list[list[int]], progress: Progress | None) -> None:
        """Enter tokens behind those in the cache, which holds each row's oldest first; keep the last one's
        logits."""
        cache = self.cache
        with self.timed("prefill"):
            # Behind the fullest set of each row: every set takes them at the same slots.
            slots, positions = cache.most_B.tolist(), self.batch.position_B.tolist()
            hidden_BE = self.runtime.prefill.read(cache, rows, slots, positions, progress)
            self.batch.position_B.add_(torch.tensor([len(row) for row in rows], device=cache.device))
            self.batch.fed_B.fill_(True)
            self.logits_BV = self.runtime.model.head(hidden_BE)
            self.tokens = rows

    # Eviction of a prompt.

    @property
    def first_step_is_due(self) -> bool:
        """Whether the next step is the first one of a turn, in which its prompt is scored and evicted. A
        prompt within its budget takes it as well, so that no row depends on how long its neighbours are."""
        if self.logits_BV is not None or self.turn_step > 0:
            return False
        if self.eviction is None or self.eviction.evict_at == "prompt":
            return False
        return self.overfull or not bool(self.batch.finished_B.all())

    def _evict_before_decoding(self, new_tokens: int) -> None:
        """Where the rule says so, score prompts, or turns, that have just been entered, and evict them to
        budget before any decode step."""
        runtime, eviction = self.runtime, self.eviction
        if eviction is None or eviction.evict_at != "prompt":
            return
        if eviction.scorer == "reconstruction":
            sources = (runtime.model, self.cache, self.batch.position_B, self.rule.coefficients())
            with self.timed("first_step"):
                reconstruct(*sources, self.tokens, prefix=runtime.repeat_prefix, sinks=eviction.sinks)
        self.evict_to_budget(new_tokens, new=False)

    def evict_to_budget(self, new_tokens: int, *, new: bool = True) -> None:
        """Score, evict down to budget, and move to the decode cache. With `new` this is the first step of a
        turn, and feeds each row's token."""
        eviction, runtime = self.eviction, self.runtime
        assert eviction is not None
        with self.timed("first_step"):
            before_BW = self._before(eviction.window)
            draft_BD = before_BW[:, :0]
            if eviction.draft and new and bool(self.cache.overfull_B.any()):
                for number in range(1, eviction.drafts + 1):
                    if runtime.on_draft is not None:
                        runtime.on_draft(number, eviction.drafts)
                    draft_BD = self._draft(before_BW, draft_BD, new_tokens)
            logits_BV, keep_BXN = self._choose(before_BW, draft_BD, new=new)
            if runtime.buffers.is_decode_cache(self.cache):
                self.cache.keep(keep_BXN)
            else:
                self.move_to(self._decode_cache(new_tokens, keep_BXN), keep_BXN)
        self.logits_BV = self.logits_BV if logits_BV is None else logits_BV
        self.overfull = False
        self.turn_step += new
        self.stats.refreshes += eviction.scores

    def _choose(
        self, before_BW: Tensor, draft_BD: Tensor, *, new: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Logits and the tokens to keep, by the evicting step; budgets are those that hold after it."""
        runtime, cache = self.runtime, self.cache
        assert self.eviction is not None
        # In another cache slots are not those of later steps.
        recorded = new and runtime.buffers.is_decode_cache(cache)
        recorder = runtime.buffers.recorder_for(cache) if recorded else None
        state = (runtime.model, cache, self.batch, self.rule, recorder, before_BW, draft_BD)
        logits_BV, keep_BXN = evicting_step(*state, new=new)
        set_budgets_after_prompt(self.eviction, cache.retention, keep_BXN)
        return logits_BV, keep_BXN

    def _draft(self, before_BW: Tensor, former_BD: Tensor, new_tokens: int) -> Tensor:
        """Decode a draft of D tokens greedily, from what the pending token's query and those of a former
        draft choose of the prompt, and restore the state: [B, D], -1 after the end of a row's draft and in
        rows within their budget."""
        runtime, batch, prompt = self.runtime, self.batch, self.cache
        changing = nn.ModuleList((batch, *prompt.retention))
        state = {name: tensor.clone() for name, tensor in changing.state_dict().items()}
        overfull_B = prompt.overfull_B
        logits_BV, keep_BXN = self._choose(before_BW, former_BD, new=True)
        assert logits_BV is not None
        self.cache = self._decode_cache(new_tokens, keep_BXN)
        self.cache.take_from(prompt, keep_BXN, release=False)
        config = runtime.model.config
        batch.configure(Sampling(), config.eos_token_ids[:MAX_EOS_IDS], config.vocab_size)
        drafted: list[Tensor] = []
        for step in range(1, runtime.drafted + 1):
            active_B = overfull_B & ~batch.finished_B
            if step == 1:
                batch.choose(logits_BV, greedy=True)
            else:
                self._run(step, greedy=True)
            drafted.append(torch.where(active_B, batch.token_B, NO_TOKEN))
        changing.load_state_dict(state)
        self.cache = prompt
        return torch.stack(drafted, dim=1)

    def _before(self, window: int) -> Tensor:
        """The last `window` tokens of each row's prompt or turn, [B, W], -1 before the first of a shorter
        one."""
        rows = [row[max(0, len(row) - window) :] for row in self.tokens]
        longest = max(map(len, rows))
        padded = [[-1] * (longest - len(row)) + row for row in rows]
        before = torch.tensor(padded, dtype=torch.int64, device=self.cache.device)
        return before.view(len(rows), longest)

    # Caches.

    def make_room(self, new_tokens: int) -> None:
        """Move to a larger decode cache if this one has too few slots for so many tokens more."""
        slots = self.cache.slots_for(new_tokens)
        if not self.overfull and self.cache.shape.slots < slots:
            self.move_to(self.runtime.buffers.decode_cache(self.stats.batch, slots))

    @property
    def own_bytes(self) -> int:
        """Bytes of its cache that are given back when it is left: the decode cache stays for the next one."""
        return 0 if self.runtime.buffers.is_decode_cache(self.cache) else self.cache.allocated_bytes

    def move_to(self, target: SlotCache, keep_BXN: Sequence[Tensor] | None = None) -> None:
        """Go on in another cache, with all tokens or those marked."""
        # Captures of steps in the cache that is left would keep it alive.
        self.runtime.graphs.drop_captures()
        buffers, source = self.runtime.buffers, self.cache
        keep_BXN = source.everything() if keep_BXN is None else keep_BXN
        size = self.own_bytes
        target.take_from(source, keep_BXN, release=size > 0)
        self.cache = target
        memory.give_back(buffers.device, size)

    def _decode_cache(self, new_tokens: int, keep_BXN: Sequence[Tensor]) -> SlotCache:
        """With room for the tokens marked, and `new_tokens` more or a draft."""
        slots = self.cache.slots_for(max(new_tokens, self.runtime.drafted), keep_BXN)
        return self.runtime.buffers.decode_cache(self.stats.batch, slots)

    # Decode steps.

    def run_step(self, greedy: bool) -> bool:
        """Feed each row's token, evict, and choose the next one. Returns whether its time is decoding, and
        not compilation."""
        stats, compiled = self.runtime.graphs.stats, self.runtime.graphs.stats.compiled
        self.turn_step += 1
        with self.timed("decode"):
            self.stats.refreshes += self._run(self.turn_step, greedy=greedy)
        self.stats.decode_steps += 1
        return stats.compiled == compiled

    def _run(self, step: int, *, greedy: bool) -> bool:
        """Decode step `step` of a turn. Returns whether it has refreshed the utilities."""
        runtime, rule, cache = self.runtime, self.rule, self.cache
        refresh = rule.refreshes_at(step)
        if rule.refresh_due is not None:
            rule.refresh_due.fill_(refresh)
        scores = refresh or rule.refresh_due is not None
        name = "refresh step" if refresh and rule.refresh_due is None else "decode step"
        args = (runtime.model, cache, self.batch, rule, runtime.buffers.recorder_for(cache))
        key = (name, runtime.graph_key, cache.shape, greedy)
        runtime.graphs.run(key, decode_step, *args, scores=scores, greedy=greedy)
        return refresh

    def check_ranks(self) -> None:
        """With `check_ranks`, check that all ranks agree."""
        if self.runtime.checks_ranks:
            retention = self.cache.retention if self.cache.shape.scope != "head" else ()
            check_agreement(self.rule.tp, self.batch.token_B, retention)

    def finish_reasons(self) -> list[FinishReason]:
        """Why each row of an answer has ended."""
        failed, ended = self.batch.failed_B.tolist(), self.batch.finished_B.tolist()
        return [
            "not_finite" if failed[row] else "stop" if row in self.stopped else "eos" if end else "length"
            for row, end in enumerate(ended)
        ]

    def complete_stats(self) -> None:
        """Fill in what is known once a prompt, a turn or an answer is complete."""
        cache, stats, runtime = self.cache, self.stats, self.runtime
        stats.sequence_tokens = self.batch.position_B.tolist()
        stats.kept_tokens = cache.kept_tokens
        stats.cache_bytes = cache.allocated_bytes
        full = runtime.buffers.shape(stats.batch, bucket(max(stats.sequence_tokens) + 1))
        stats.full_cache_bytes = full.nbytes(cache.dtype)
        stats.graphs = replace(runtime.graphs.stats)

    @contextmanager
    def timed(self, part: Literal["prefill", "first_step", "decode"]) -> Iterator[None]:
        """Add the time of a block to the stats, without what it spent on compiling."""
        graphs, device, seconds = self.runtime.graphs.stats, self.runtime.buffers.device, self.stats.seconds
        start, compiled = time.perf_counter(), graphs.seconds
        yield
        if part != "decode" and device.type == "cuda":
            torch.cuda.synchronize(device)
        compiled = graphs.seconds - compiled
        seconds.compile += compiled
        elapsed = time.perf_counter() - start - compiled
        setattr(seconds, part, getattr(seconds, part) + elapsed)


UnreadStep = tuple[tuple[int, int, int], bool]
"""A step whose tokens are still on the device: the counts before it (decode steps, refreshes, steps of the
turn), and whether its time is decoding, and not compilation."""


@dataclass(eq=False)
class GenerationLoop:
    """An answer of at most `max_new_tokens` a row. `eos`: the ids that end a row. `read_every`: steps between
    two reads of tokens from the device."""

    conversation: Conversation
    max_new_tokens: int
    sampling: Sampling
    eos: Sequence[int]
    stop: Stop | None
    read_every: int

    def tokens(self) -> Iterator[list[int]]:
        """One list of tokens a step, `NO_TOKEN` for a row that has ended. To be followed by `finish`, however
        soon it is left."""
        conversation, stats = self.conversation, self.conversation.stats
        vocab_size = conversation.runtime.model.config.vocab_size
        conversation.batch.configure(self.sampling, self.eos, vocab_size)
        conversation.make_room(self.max_new_tokens)
        answer: list[list[int]] = [[] for _ in range(stats.batch)]
        for unread in self._steps():
            with conversation.timed("decode"):
                history = conversation.batch.read(len(unread))
            for (before, timed), tokens in zip(unread, history, strict=True):
                if all(token == NO_TOKEN for token in tokens):
                    # It and those after it ran when every row had ended, and changed nothing.
                    stats.decode_steps, stats.refreshes, conversation.turn_step = before
                    return
                if timed:
                    stats.timed_tokens += sum(token != NO_TOKEN for token in tokens)
                for row, token in enumerate(tokens):
                    if token != NO_TOKEN:
                        answer[row].append(token)
                        if self.stop is not None and self.stop(row, answer[row]):
                            conversation.batch.finished_B[row] = True
                            conversation.stopped.add(row)
                yield tokens

    def finish(self) -> None:
        """Leave the cache within its budget, and complete the stats. An answer of a single token has not
        taken the first step, in which its prompt is scored and evicted; it is taken here."""
        conversation = self.conversation
        if conversation.first_step_is_due:
            conversation.evict_to_budget(self.max_new_tokens)
            conversation.check_ranks()
        conversation.complete_stats()

    def _steps(self) -> Iterator[list[UnreadStep]]:
        """Run the steps; yields those whose tokens are to be read now."""
        conversation, greedy = self.conversation, self.sampling.greedy
        batch, stats = conversation.batch, conversation.stats
        unread: list[UnreadStep] = []
        if bool(batch.finished_B.all()):
            return
        for index in range(self.max_new_tokens):
            if conversation.first_step_is_due:
                conversation.evict_to_budget(self.max_new_tokens)
            before = (stats.decode_steps, stats.refreshes, conversation.turn_step)
            if conversation.logits_BV is not None:
                batch.choose(conversation.logits_BV, greedy=greedy)
                conversation.logits_BV = None
                timed = False
            else:
                timed = conversation.run_step(greedy)
            conversation.check_ranks()
            unread.append((before, timed))
            if len(unread) == self.read_every or index == self.max_new_tokens - 1:
                yield unread
                unread = []
                if bool(batch.finished_B.all()):
                    return
