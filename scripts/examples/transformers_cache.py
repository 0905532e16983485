"""`generate` of transformers with a tenth of the KV cache: a long text, a question, and another one.

Examples:
  python scripts/examples/transformers_cache.py
  python scripts/examples/transformers_cache.py meta-llama/Llama-3.2-1B-Instruct
"""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's own packages, installed or not

from inertiakv import EvictionConfig
from inertiakv.integrations.transformers import InertiaCache
from inertiakv.models.encoding import chat_text, decode_answer, encode_chat
from inertiakv.models.hub import find_folder

DEMO = Path(__file__).resolve().parents[1] / "demo"
NEW_TOKENS = 32


def generate(model: Any, ids_BT: Tensor, cache: Any) -> Tensor:
    """All tokens with the answer to them. Versions of transformers differ in what they call a cache."""
    names = inspect.signature(model.prepare_inputs_for_generation).parameters
    options = {"cache" if "cache" in names else "past_key_values": cache}
    mask_BT = torch.ones_like(ids_BT)
    return model.generate(
        ids_BT, attention_mask=mask_BT, max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )


def further_turn(tokenizer: Any, turn: str) -> list[int]:
    """What the chat template writes behind an answer: its end, the turn, and where the next answer begins."""
    answer = "THE ANSWER"
    chat = [("user", "Hello"), ("assistant", answer), ("user", turn)]
    text = chat_text(tokenizer, [{"role": role, "content": content} for role, content in chat])
    return tokenizer(text.rpartition(answer)[2], add_special_tokens=False).input_ids


def main(name: str = "smollm2-135m") -> None:
    folder, _ = find_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos_ids = {tokenizer.eos_token_id}
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.eos_token_id
    text = (DEMO / "lighthouse.txt").read_text() + (DEMO / "question.txt").read_text()
    turns = [
        encode_chat(tokenizer, [{"role": "user", "content": text}]),
        further_turn(tokenizer, "And where does the text take place?"),
    ]

    full: Any = DynamicCache(config=model.config)
    evicting = InertiaCache(model, EvictionConfig(compression=0.9, refresh=4))
    for title, cache in (("the full cache", full), ("a tenth of it", evicting)):
        print(f"# {title}", flush=True)
        print(f"reading {len(turns[0]):,} tokens, on a CPU a minute or more ...", file=sys.stderr)
        ids: list[int] = []
        for turn in turns:
            ids += turn
            start = time.perf_counter()
            answer = generate(model, torch.tensor([ids]), cache)[0, len(ids) :].tolist()
            seconds = time.perf_counter() - start
            print(decode_answer(tokenizer, answer, eos_ids).strip())
            print(f"  ({len(answer)} tokens in {seconds:.1f} s with the prompt)")
            # Where the last token ends the answer, the template writes it.
            ids += answer[:-1] if answer[-1] in eos_ids else answer
    bytes_full = sum(t.nbytes for layer in full.layers for t in (layer.keys, layer.values))
    print(
        f"{evicting.kept_tokens[0]:.0f} of {evicting.sequence_tokens[0]} tokens are kept, "
        f"{evicting.allocated_bytes / 1e6:.1f} MB instead of {bytes_full / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
