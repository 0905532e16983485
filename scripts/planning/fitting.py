"""Whether what was asked for fits, what is missing, and what would make it fit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from inertiakv import EvictionConfig
from inertiakv.compiling.collectives import TensorParallel
from inertiakv.decoding.tensor_parallel import check_rule
from inertiakv.models import ModelConfig, parallel

from .memory import CHUNK, Footprint, make_footprint, make_shard

LEAST_CHUNK = 64
"""Smaller chunks make reading a prompt slow, and hardly take less memory."""
_shard = functools.lru_cache(maxsize=8)(make_shard)


@dataclass(frozen=True)
class Request:
    """Rows of a batch whose prompts are read together, and what holds the model."""

    config: ModelConfig
    dtype: torch.dtype
    quantize: str | None
    ranks: int
    context: int
    new_tokens: int
    batch: int
    rule: EvictionConfig | None
    on_cpu: bool
    chunk: int = CHUNK

    @functools.cached_property
    def footprint(self) -> Footprint:
        """Raises ValueError for what cannot be split, quantised, or evicted to its budget."""
        shard = _shard(self.config, self.dtype, self.quantize, self.ranks)
        return make_footprint(
            shard, self.context, self.new_tokens, self.rule, chunk=self.chunk, on_cpu=self.on_cpu
        )

    @property
    def size(self) -> int:
        """Bytes on each rank."""
        return self.footprint.together(self.batch)

    def fits(self, available: float) -> bool:
        """False, too, for what cannot be."""
        try:
            check_rule(self.rule, parallel.share(self.config, TensorParallel(size=self.ranks))[1])
            return self.size <= available
        except ValueError:
            return False

    def parts(self) -> dict[str, int]:
        one = self.footprint
        caches = {"prompt cache": one.prompt_cache, "decode cache": one.decode_cache}
        rows = {part: self.batch * size for part, size in (caches | {"workspace": one.workspace}).items()}
        return {"weights": one.weights} | rows


def describe(asked: Request, available: float) -> dict[str, Any]:
    """As JSON: the bytes that are to spare, or missing, and the changes of which each makes it fit."""
    one_by_one = asked.footprint.one_by_one(asked.batch)
    spare = int(available) - asked.size
    return {
        "batch": asked.batch,
        "fits": "together" if spare >= 0 else "one by one" if one_by_one <= available else "no",
        "available_bytes": int(available),
        "bytes": asked.size,
        "bytes_one_by_one": one_by_one,
        "parts": asked.parts(),
        "spare_bytes": max(0, spare),
        "missing_bytes": max(0, -spare),
        "changes": [] if spare >= 0 else list(_changes(asked, available)),
    }


def _changes(asked: Request, available: float) -> Iterator[dict[str, Any]]:
    """Every change alone, and int8 weights with a second one where neither is enough."""
    shorter, split = longest_context(asked, available), fewest_ranks(asked, available)
    if shorter:
        yield _change(shorter, context=shorter.context)
    if rows := asked.footprint.most_together(available):
        yield _change(replace(asked, batch=rows), batch=rows)
    small = replace(asked, quantize="int8")
    if asked.quantize is None and small.fits(available):
        yield _change(small, quantize="int8")
    if split:
        yield _change(split, ranks=split.ranks)
    if chunked := largest_chunk(asked, available):
        yield _change(chunked, prefill_chunk=chunked.chunk)
    if asked.quantize is not None or small.fits(available):
        return
    longer = longest_context(small, available)
    if longer and (shorter is None or longer.context > shorter.context):
        yield _change(longer, quantize="int8", context=longer.context)
    both = None if split else fewest_ranks(small, available)
    if both:
        yield _change(both, quantize="int8", ranks=both.ranks)


def _change(request: Request, **options: int | str) -> dict[str, Any]:
    return {"options": options, "bytes": request.size}


def longest_context(asked: Request, available: float) -> Request | None:
    """With the longest prompts that fit, by bisection: more tokens never take less."""
    fits, too_long = 0, asked.context
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if replace(asked, context=middle).fits(available):
            fits = middle
        else:
            too_long = middle
    return replace(asked, context=fits) if fits else None


def fewest_ranks(asked: Request, available: float) -> Request | None:
    """On more ranks: the smallest power of two that divides the KV heads and is enough."""
    heads = asked.config.num_kv_heads
    counts = (2**n for n in range(1, heads.bit_length()))
    tried = (replace(asked, ranks=n) for n in counts if n > asked.ranks and heads % n == 0)
    return next((request for request in tried if request.fits(available)), None)


def largest_chunk(asked: Request, available: float) -> Request | None:
    """With the largest chunks of half the tokens, or a quarter and so on, that fit."""
    tried = (replace(asked, chunk=CHUNK >> n) for n in range(1, (CHUNK // LEAST_CHUNK).bit_length()))
    return next((request for request in tried if request.fits(available)), None)


def sentences(plan: dict[str, Any]) -> list[str]:
    """One where all that was asked for fits, and otherwise a paragraph for each policy."""
    entries, available = plan["fitting"], _gb(plan["fitting"][0]["available_bytes"])
    if any(entry["missing_bytes"] for entry in entries):
        return [_paragraph(entry, available) for entry in entries]
    takes = " and ".join(f"{_gb(entry['bytes'])} {_under(entry)}" for entry in entries)
    spare = _gb(min(entry["spare_bytes"] for entry in entries))
    return [f"It fits: {_rows(entries[0])} take {takes}, of {available}; {spare} are to spare."]


def _paragraph(entry: dict[str, Any], available: str) -> str:
    asked, size = f"{_rows(entry)} {_under(entry)}", _gb(entry["bytes"])
    if not entry["missing_bytes"]:
        return f"{asked}: fits. It takes {size} of {available}; {_gb(entry['spare_bytes'])} are to spare."
    how = "does not fit"
    if entry["fits"] == "one by one":
        how = f"fits only where prompts are read one by one ({_gb(entry['bytes_one_by_one'])})"
    parts = ", ".join(f"{part} {_gb(size)}" for part, size in entry["parts"].items() if size)
    alone = "; the weights alone are too much" if entry["parts"]["weights"] > entry["available_bytes"] else ""
    changes = ", or ".join(map(_said, entry["changes"])) or "only a larger device"
    return (
        f"{asked}: {how}. Read in one call it takes {size} ({parts}) where {available} may be filled: "
        f"{_gb(entry['missing_bytes'])} are missing{alone}. What would fit: {changes}."
    )


def _rows(entry: dict[str, Any]) -> str:
    rows = "1 row" if entry["batch"] == 1 else f"{entry['batch']:,} rows"
    return f"{rows} of {entry['context']:,} tokens" + f" on {entry['ranks']} ranks" * (entry["ranks"] > 1)


def _under(entry: dict[str, Any]) -> str:
    return "with the full cache" if entry["policy"] == "full" else f"under {entry['policy']}"


def _said(change: dict[str, Any]) -> str:
    """As what one types."""
    options = change["options"]
    if "prefill_chunk" in options:
        words = f"Decoder(prefill_chunk={options['prefill_chunk']}) in Python"
    else:
        words = " ".join(f"--{option} {value}" for option, value in options.items())
    return f"{words} ({_gb(change['bytes'])}{' on each' * ('ranks' in options)})"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"
