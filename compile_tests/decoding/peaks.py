"""Run with heap.c preloaded, for test_needs.py: what requests take, as JSON lines of name, rows, what was
promised and what was taken."""

from __future__ import annotations

import ctypes
import gc
import json
import sys

import torch

from compile_tests.tiny import random_model
from inertiakv import Decoder, policy
from inertiakv.cache import memory
from inertiakv.models import Transformer, parse_config

TOKENS, CHUNK, ANSWER, VOCAB = 1000, 128, 3, 1000


def model(dtype: torch.dtype, device: str = "cpu") -> Transformer:
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4 * TOKENS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return random_model(parse_config(raw), 0, dtype).to(device)


def prompts(rows: int, shorter: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows)
    lengths = [TOKENS - shorter * row for row in range(rows)]
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def main(cases: list[tuple[str, int, int, str]]) -> None:
    heap = ctypes.CDLL(None)
    heap.heap_rise.restype = ctypes.c_long
    promised: list[int] = []
    original = memory.require

    def spy(parts: dict[str, int], *args: object) -> None:
        promised.append(sum(parts.values()))
        original(parts, *args)  # type: ignore[arg-type]

    memory.require = spy
    models = {name: model(getattr(torch, name)) for name in {case[3] for case in cases}}
    for name, rows, shorter, dtype in cases:
        # The first request fills what libraries keep.
        for _ in range(1 if dtype == "float32" else 2):
            decoder = Decoder(models[dtype], policy(name), compile=False, prefill_chunk=CHUNK)
            promised.clear()
            gc.collect()
            heap.heap_rise()
            decoder.generate(prompts(rows, shorter), ANSWER, eos_token_ids=())
            taken = heap.heap_rise()
            del decoder
        print(json.dumps([name, rows, shorter, dtype, promised[0], taken]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
