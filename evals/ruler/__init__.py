"""RULER: thirteen tasks of any length, made here with the tokenizer of the model that is asked.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
https://arxiv.org/abs/2404.06654. Templates, parameters and metrics are those of its `synthetic.yaml`, but the
samples are not: each has a random generator of its own (see `Generated`), and essays may be others.
"""

from __future__ import annotations

from pathlib import Path

from ..essays import Essays
from ..task import CountTokens
from .generated import Generated
from .niah import NEEDLES, Niah
from .qa import SOURCES, DocumentQuestions, load_corpus
from .variables import VariableTracking
from .words import CommonWords, FrequentWords

OTHERS: dict[str, type[VariableTracking | CommonWords | FrequentWords]] = {
    "vt": VariableTracking,
    "cwe": CommonWords,
    "fwe": FrequentWords,
}
TASKS = tuple(f"ruler:{name}" for name in (*NEEDLES, *OTHERS, *SOURCES))


def make(
    name: str, count_tokens: CountTokens, seed: int, essays: Essays | None, data: Path | None = None
) -> Generated:
    """The task `ruler:vt` and so on. `data`: a folder with the files of qa_1 and qa_2, which else come from
    the hub. Raises FileNotFoundError where these cannot be had."""
    short = name.removeprefix("ruler:")
    if short in NEEDLES:
        assert essays is not None
        return Niah(short, count_tokens, seed, essays)
    if short in SOURCES:
        return DocumentQuestions(short, count_tokens, seed, load_corpus(short, data))
    return OTHERS[short](short, count_tokens, seed)
