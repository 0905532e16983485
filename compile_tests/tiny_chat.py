"""A tiny random model with a tokenizer and a chat template, as a folder that `load_model` takes.

One token a byte, and a few special ones. Two kinds: `llama`, whose tokenizer puts a BOS and whose template
writes it, too, and `qwen`, which has none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from compile_tests.models.reference import tiny_checkpoint

BOS, EOS = "<s>", "</s>"
START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + message['role'] + ' is not known') }}"
    "{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def tiny_tokenizer(kind: str = "llama") -> PreTrainedTokenizerFast:
    special = [BOS, EOS] if kind == "llama" else [START, END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=LLAMA
        )
    tokenizer.add_special_tokens([START])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=CHATML)


def tiny_chat(folder: Path, kind: str = "llama", *, max_positions: int = 4096, **options: Any) -> Path:
    """The folder, with a model whose answers end by their length: `generation_config.json` names an id that
    is no token's."""
    tokenizer = tiny_tokenizer(kind)
    family = "llama" if kind == "llama" else "qwen2"
    tiny_checkpoint(folder, family, vocab_size=300, max_position_embeddings=max_positions, **options)
    tokenizer.save_pretrained(folder)
    set_eos(folder, 299)
    return folder


def set_eos(folder: Path, *ids: int) -> None:
    """Make these ids the ones that end an answer."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ids)}))
