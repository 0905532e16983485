"""Prompts in batches: which go together, one reading for several policies, and their results put together."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from inertiakv import Decoder, Generation, Sampling, Stats
from inertiakv.scripts.cli.console import Detokenizer, PrefillBar, StreamPrinter

Part = tuple[list[int], Generation]
"""The places of some prompts among all, and their answers."""


def choose_batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The places of the prompts that are answered together. They are of similar lengths, since a batch is as
    wide as its longest, and the longest come first: what does not fit is known at once."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    return [sorted(order[start : start + size]) for start in range(0, len(order), size)]


class Answerer:
    """Answers batches of prompts with each of its decoders. Where there are several, `reader` reads a batch
    for all of them; it may be the last one itself.

    `stream`: print the answer to a single prompt as it comes."""

    def __init__(
        self,
        decoders: Sequence[Decoder],
        reader: Decoder | None,
        detokenizer: Detokenizer,
        max_new_tokens: int,
        sampling: Sampling,
        stream: bool,
    ) -> None:
        self.decoders, self.reader, self.detokenizer = decoders, reader, detokenizer
        self.max_new_tokens, self.sampling, self.stream = max_new_tokens, sampling, stream

    def answer_all(
        self,
        rows: list[list[int]],
        batch_size: int,
        begin: Callable[[int], None],
        done: Callable[[int, Part], None],
    ) -> list[Generation]:
        """The answers of each decoder. `begin` is called before one answers a batch, with its number, and
        `done` afterwards. The seconds of each prefill are those of the reading, and of what the rule adds to
        it."""
        batches = choose_batches(list(map(len, rows)), batch_size)
        parts: list[list[Part]] = [[] for _ in self.decoders]
        for number, batch in enumerate(batches, 1):
            label = f" (batch {number} of {len(batches)})" if len(batches) > 1 else ""
            try:
                for decoder, out in enumerate(self._answer_batch([rows[n] for n in batch], label, begin)):
                    parts[decoder].append((batch, out))
                    done(decoder, (batch, out))
            except MemoryError as error:
                hint = f"; --batch-size {len(batch) // 2} needs less" if len(batch) > 1 else ""
                raise MemoryError(f"{error or 'out of memory'}{hint}") from error
        return list(map(merge, parts))

    def _answer_batch(
        self, rows: list[list[int]], label: str, begin: Callable[[int], None]
    ) -> Iterator[Generation]:
        reader, length = self.reader, self.max_new_tokens
        with contextlib.closing(PrefillBar(sum(map(len, rows)), label)) as bar:
            if reader is None:
                begin(0)
                (decoder,) = self.decoders
                yield self._answer(partial(decoder.generate, rows, progress=bar))
                return
            reader.prefill(rows, max_new_tokens=length, progress=bar)
        seconds = reader.stats.seconds.prefill
        for number, decoder in enumerate(self.decoders):
            begin(number)
            if decoder is not reader:
                decoder.take_prompt(reader, max_new_tokens=length)
            out = self._answer(decoder.decode)
            if decoder is not reader:
                out.stats.seconds.prefill += seconds
            yield out

    def _answer(self, decode: Callable[..., Generation]) -> Generation:
        printer = StreamPrinter(self.detokenizer) if self.stream else None
        stop = printer or self.detokenizer.stop
        out = decode(max_new_tokens=self.max_new_tokens, sampling=self.sampling, stop=stop)
        if printer:
            printer.end()
        return out


def merge(parts: Sequence[Part]) -> Generation:
    """The answers of several batches as one, in the order of the prompts. Counts and seconds add up; bytes
    are those of the largest batch."""
    if len(parts) == 1:
        return parts[0][1]
    places = [place for batch, _ in parts for place in batch]

    def in_order(lists: Sequence[Sequence[Any]]) -> list[Any]:
        values = [value for some in lists for value in some]
        return [value for _, value in sorted(zip(places, values, strict=True), key=lambda pair: pair[0])]

    outs = [out for _, out in parts]
    all_stats = [out.stats for out in outs]
    seconds = dataclasses.replace(all_stats[0].seconds)
    for part in dataclasses.fields(seconds):
        setattr(seconds, part.name, sum(getattr(stats.seconds, part.name) for stats in all_stats))
    by_row = ("prompt_tokens", "budgets", "sequence_tokens", "kept_tokens")
    columns: dict[str, Any] = {
        name: in_order([getattr(stats, name) for stats in all_stats]) for name in by_row
    }
    counts = ("refreshes", "decode_steps", "timed_tokens")
    sums = {name: sum(getattr(stats, name) for stats in all_stats) for name in counts}
    sizes = ("cache_bytes", "full_cache_bytes")
    largest = {name: max(getattr(stats, name) for stats in all_stats) for name in sizes}
    return Generation(
        in_order([out.tokens for out in outs]),
        in_order([out.finish_reasons for out in outs]),
        Stats(**columns, **sums, **largest, seconds=seconds, graphs=all_stats[-1].graphs),
    )
