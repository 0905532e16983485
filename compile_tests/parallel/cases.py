"""What is asked of a model on one process and on several, and what must be equal then."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_tests.models.reference import tiny_checkpoint
from compile_tests.tiny import prompt_logits, set_states
from inertiakv import Decoder, EvictionConfig, Sampling, policy
from inertiakv.compiling.collectives import TensorParallel
from inertiakv.models import load_checkpoint

VOCAB = 96
LENGTHS = (40, 23, 31)
NEW_TOKENS = 10


@dataclass(frozen=True)
class Case:
    """A model of a family, with 8 query heads, and a rule."""

    family: str
    rule: EvictionConfig | None
    kv_heads: int = 4
    sampling: Sampling = Sampling()  # noqa: RUF009 (immutable)
    dtype: str = "float64"
    quantize: str | None = None
    compile: bool = False

    def folder(self, root: Path) -> Path:
        return root / f"{self.family}-{self.kv_heads}"

    def make(self, root: Path) -> None:
        """The checkpoint, where it is not there yet; of Qwen2 with tied embeddings."""
        if not self.folder(root).exists():
            sizes: dict[str, Any] = {"vocab_size": VOCAB, "heads": 8, "kv_heads": self.kv_heads}
            tied = self.family == "qwen2"
            tiny_checkpoint(self.folder(root), self.family, tie_word_embeddings=tied, **sizes)


_POOLED = policy("inertiakv", budget=14, window=5, pool=3, pool_at="always", rescue=3)
_SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=3)
_REHEARSED = policy("rehearsed", budget=12, draft=6)
_EXPECTED = policy("adakv_ea", budget=12, window=8, scope="shared", allocation="uniform")
FAMILIES = {
    "llama, full cache": Case("llama", None),
    "llama, KV heads held twice": Case(
        "llama", policy("inertiakv", budget=12, scorer="value_norm"), kv_heads=2
    ),
    "mistral": Case("mistral", policy("lazy4", budget=12, sinks=2)),
    "qwen2": Case("qwen2", policy("inertiakv", budget=12, scorer="value_norm")),
    "qwen3, KV heads held twice": Case("qwen3", policy("inertiakv", budget=9, recent=3), kv_heads=2),
    "qwen3_moe": Case("qwen3_moe", policy("lazy2", budget=12)),
    "a set a head": Case("llama", policy("h2o", budget=12)),
    "rehearsed, KV heads held twice": Case("llama", _REHEARSED, kv_heads=2),
}
RULES = {
    "the paper's": Case("llama", policy("inertiakv", budget=12)),
    "key norms": Case("llama", policy("knorm", budget=12, scope="shared")),
    "above the mean": Case("llama", policy("scissorhands", budget=12, scope="shared", recent=2)),
    "two layers": Case("llama", policy("inertiakv", budget=12, layers=(0, 1), new_token="mean")),
    "pooled and rescued": Case("qwen2", _POOLED),
    "chance": Case("llama", policy("random", budget=12)),
    "a set a layer": Case("qwen2", policy("tova", budget=12)),
    "prompts": Case("llama", policy("snapkv", budget=12, window=4, recent=4)),
    "the best query": Case("qwen2", policy("inertiakv", budget=12, window=4, window_by="max")),
    "a layer's best query": Case("llama", policy("tova", budget=12, window=4, window_by="max")),
    "a head's best query": Case("llama", policy("snapkv", budget=12, window=4, recent=4, window_by="max")),
    "expected attention": Case("llama", _EXPECTED),
    "sampled": Case("qwen2", policy("inertiakv", budget=12), sampling=_SAMPLED),
}
if importlib.util.find_spec("torchao"):
    RULES["int8"] = Case("qwen2", policy("lazy2", budget=12), quantize="int8")
COMPILED = {"compiled": Case("qwen2", policy("inertiakv", budget=12), dtype="float32", compile=True)}
BY_SIZE = {2: FAMILIES | RULES | COMPILED, 4: FAMILIES}
"""What so many ranks run."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def run(case: Case, root: Path, tp: TensorParallel) -> dict[str, Any]:
    """What a process comes out with."""
    model = load_checkpoint(case.folder(root), case.dtype, quantize=case.quantize, tp=tp)
    together = tp.size > 1
    decoder = Decoder(model, case.rule, compile=case.compile, attention="dense", check_ranks=together)
    decoder.prefill(prompts(), max_new_tokens=NEW_TOKENS)
    logits_BV = prompt_logits(decoder).clone()
    out = decoder.decode(NEW_TOKENS, sampling=case.sampling, eos_token_ids=())
    assert decoder.cache is not None
    sets = [set_states(decoder.cache, row) for row in range(len(LENGTHS))]
    graphs = out.stats.graphs
    return {
        "logits": logits_BV,
        "tokens": out.tokens,
        "kept": [[state.kept for state in of_row] for of_row in sets],
        "utilities": [[state.utility_N for state in of_row] for of_row in sets],
        "num_bytes": model.bytes_read,
        "cache_bytes": out.stats.cache_bytes,
        "graphs": (graphs.compiled, graphs.breaks, graphs.recompiles),
    }
