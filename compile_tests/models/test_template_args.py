"""What a chat template is given beside the messages, and what a template raises."""

from typing import Any

import pytest

from compile_tests.tiny_chat import LLAMA, tiny_tokenizer
from inertiakv.evals.task import Prompting
from inertiakv.models.encoding import chat_text

CHAT = [{"role": "user", "content": "a"}]
THINKING = LLAMA + "{% if enable_thinking is defined and enable_thinking is false %}{{ '<none>' }}{% endif %}"
SET = "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}" + (
    "{{ enable_thinking }}{% set ns = namespace(found=1) %}{% for m in messages %}{{ 1 }}{% endfor %}"
)


def with_template(template: Any) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template,with_it,without",
    [
        (THINKING, "<s>[user]a</s>[assistant]<none>", "<s>[user]a</s>[assistant]"),
        (SET, "False1", "True1"),
        ("{% generation %}{{ enable_thinking }}{% endgeneration %}", "False", ""),
        ({"default": THINKING, "tool_use": "{{ other }}"}, "<s>[user]a</s>[assistant]<none>", None),
    ],
)
def test_an_argument_reaches_the_template(template: Any, with_it: str, without: str | None) -> None:
    tokenizer = with_template(template)
    assert chat_text(tokenizer, CHAT, template_args={"enable_thinking": False}) == with_it
    if without is not None:
        assert chat_text(tokenizer, CHAT) == without


def test_tools() -> None:
    tokenizer = with_template("{{ tools[0].name }}")
    assert chat_text(tokenizer, CHAT, template_args={"tools": [{"name": "f"}]}) == "f"


@pytest.mark.parametrize(
    "template,args,message",
    [
        (THINKING, {"thinking": False}, "does not use 'thinking'; it uses enable_thinking"),
        (LLAMA, {"a": 1}, "does not use 'a'; it uses no arguments"),
        (SET, {"found": 1}, "does not use 'found'"),
        ("{% generation %}{% endgeneration %}", {"a": 1}, "does not use 'a'"),
        ({"default": LLAMA, "tool_use": "{{ other }}"}, {"other": 1}, "does not use 'other'"),
        (THINKING, {"tokenize": True}, "'tokenize' is not one to give"),
        (THINKING, {"messages": []}, "'messages' is not one to give"),
        (THINKING, {"add_generation_prompt": False}, "'add_generation_prompt' is not one to give"),
        (None, {"a": 1}, "has no chat template"),
    ],
)
def test_arguments_that_would_be_ignored(template: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat_text(with_template(template), CHAT, template_args=args)


@pytest.mark.parametrize(
    "template,message",
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages[0].content + 1 }}", "TypeError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
        ("{{ messages[5].content }}", ""),
        ("{{ messages | tojson(indent='x', sort_keys=5) }}{{ {}['a'].b }}", ""),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{% if %}", ""),
        ("{{ (1).__class__.__mro__ }}", ""),
        ("{{ strftime_now(5) }}", "TypeError: "),
    ],
)
def test_whatever_a_template_raises(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^the chat template does not take line 3: {message}") as caught:
        chat_text(with_template(template), CHAT, "line 3")
    assert type(caught.value) is ValueError


def test_prompting() -> None:
    tokenizer = with_template(THINKING)
    plain, told = Prompting(tokenizer, "chat"), Prompting(tokenizer, "chat", {"enable_thinking": False})
    assert tokenizer.decode(told.encode("a")) == tokenizer.decode(plain.encode("a")) + "<none>"
    with pytest.raises(ValueError, match="does not use 'a'"):
        Prompting(tokenizer, "chat", {"a": 1})
    with pytest.raises(ValueError, match="no effect with --template none"):
        Prompting(tokenizer, "none", {"enable_thinking": False})
