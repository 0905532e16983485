"""Between text and token ids: chat templates, exactly one BOS, the text of an answer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

Message = Mapping[str, str]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, after exactly one BOS if the tokenizer adds one, and without an EOS.

    The text may begin with a BOS already, as the output of most chat templates does."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    puts_bos = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
    return [bos, *ids] if puts_bos and ids[:1] != [bos] else ids


def encode_chat(tokenizer: Any, messages: Sequence[Message], origin: str = "these messages") -> list[int]:
    """Token ids of a chat in the tokenizer's template, up to where the answer begins."""
    return encode_text(tokenizer, chat_text(tokenizer, messages, origin))


def chat_text(tokenizer: Any, messages: Sequence[Message], origin: str = "these messages") -> str:
    """The text of a chat in the tokenizer's template, up to where the answer begins."""
    if not tokenizer.chat_template:
        raise ValueError("this model's tokenizer has no chat template; use --raw for the text as it is")
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ValueError(f"the chat template does not take {origin}: {error}") from error
    return text


def decode_answer(tokenizer: Any, tokens: Sequence[int], eos_ids: Collection[int]) -> str:
    """The text of an answer, without the token that ended it."""
    if tokens and tokens[-1] in eos_ids:
        tokens = tokens[:-1]
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text
