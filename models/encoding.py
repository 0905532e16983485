"""Between text and token ids: chat templates, exactly one BOS, the text of an answer."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .files import check_text

Message = Mapping[str, str]
NO_ARGS: Mapping[str, Any] = {}


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, after exactly one BOS if the tokenizer adds one, and without an EOS.

    The text may begin with a BOS already, as the output of most chat templates does. Raises ValueError for
    one that is not Unicode: it has lone surrogates."""
    check_text(text, "the prompt")
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    puts_bos = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
    return [bos, *ids] if puts_bos and ids[:1] != [bos] else ids


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    origin: str = "these messages",
    template_args: Mapping[str, Any] = NO_ARGS,
) -> list[int]:
    """Token ids of a chat in the tokenizer's template, up to where the answer begins."""
    return encode_text(tokenizer, chat_text(tokenizer, messages, origin, template_args))


def chat_text(
    tokenizer: Any,
    messages: Sequence[Message],
    origin: str = "these messages",
    template_args: Mapping[str, Any] = NO_ARGS,
) -> str:
    """The text of a chat in the tokenizer's template, up to where the answer begins.

    template_args: what the template is given beside the messages, as Qwen3's `enable_thinking`.

    Raises ValueError where there is no template, where it does not use an argument, and for whatever it
    raises."""
    check_template_args(tokenizer, template_args)
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **template_args
        )
    except MemoryError:
        raise
    except Exception as error:  # a template is a program
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise ValueError(f"the chat template does not take {origin}: {kind}{error}") from error
    return text


def check_template_args(tokenizer: Any, template_args: Mapping[str, Any]) -> None:
    """Raise ValueError for a tokenizer without a chat template, and for arguments that would be ignored."""
    if not tokenizer.chat_template:
        raise ValueError("this model's tokenizer has no chat template; use --raw for the text as it is")
    if not template_args:
        return
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"tools", "documents"}
    used = _template_variables(tokenizer)
    for name in template_args:
        if name in own | {"messages"}:
            raise ValueError(f"template argument {name!r} is not one to give: it is set here")
        if used is not None and name not in used:
            others = ", ".join(sorted(used - own - {"messages", *tokenizer.special_tokens_map}))
            raise ValueError(f"the chat template does not use {name!r}; it uses {others or 'no arguments'}")


def _template_variables(tokenizer: Any) -> set[str] | None:
    """The variables that the chat template reads; None where this cannot be told."""
    from jinja2 import Environment, TemplateError, meta

    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = tokenizer.get_chat_template()
        environment: Environment = _compile_jinja_template(template).environment
        return meta.find_undeclared_variables(environment.parse(template))
    except (ImportError, AttributeError, ValueError, TypeError, TemplateError):
        return None


def decode_answer(tokenizer: Any, tokens: Sequence[int], eos_ids: Collection[int]) -> str:
    """The text of an answer, without the token that ended it."""
    if tokens and tokens[-1] in eos_ids:
        tokens = tokens[:-1]
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text
