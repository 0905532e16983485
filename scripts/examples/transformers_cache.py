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
from models.hub import find_folder

DEMO = Path(__file__).resolve().parents[1] / "demo"
NEW_TOKENS = 32


def answer(model: Any, ids_BT: Tensor, cache: Any) -> Tensor:
    """All tokens with the answer to them. Versions of transformers differ in what they call a cache."""
    names = inspect.signature(model.prepare_inputs_for_generation).parameters
    options = {"cache" if "cache" in names else "past_key_values": cache}
    return model.generate(ids_BT, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def main(name: str = "smollm2-135m") -> None:
    folder, _ = find_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.generation_config.pad_token_id = model.generation_config.pad_token_id or tokenizer.eos_token_id
    text = (DEMO / "lighthouse.txt").read_text() + (DEMO / "question.txt").read_text()
    turns = [text, "And where does the text take place?"]

    full = DynamicCache(config=model.config)
    evicting = InertiaCache(model, EvictionConfig(compression=0.9, refresh=4))
    for title, cache in (("the full cache", full), ("a tenth of it", evicting)):
        print(f"# {title}")
        ids_BT = torch.empty(1, 0, dtype=torch.int64)
        for turn in turns:
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": turn}], add_generation_prompt=True, tokenize=False
            )
            new_BT = tokenizer(chat, return_tensors="pt", add_special_tokens=False).input_ids
            ids_BT = torch.cat((ids_BT, new_BT), dim=1)
            start = time.perf_counter()
            out_BT = answer(model, ids_BT, cache)
            seconds = time.perf_counter() - start
            print(tokenizer.decode(out_BT[0, ids_BT.shape[1] :], skip_special_tokens=True).strip())
            print(f"  ({out_BT.shape[1] - ids_BT.shape[1]} tokens in {seconds:.1f} s with the prompt)")
            ids_BT = out_BT
    keys = sum(t.nbytes for layer in full.layers for t in (layer.keys, layer.values))
    print(
        f"{evicting.kept_tokens[0]:.0f} of {evicting.sequence_tokens[0]} tokens are kept, "
        f"{evicting.allocated_bytes / 1e6:.1f} MB instead of {keys / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
