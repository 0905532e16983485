"""Where prompts come from, and which of them take the chat template."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from inertiakv.models.encoding import Message, encode_chat, encode_text
from inertiakv.models.files import check_text, parse_json, read_text
from inertiakv.scripts.cli.arguments import Option

TemplateArgs = Annotated[tuple[str, ...], Option(metavar="KEY=VALUE")]


@dataclass(frozen=True)
class Prompt:
    """One prompt: a text, or the messages of a chat. `origin` says in errors which one it is."""

    content: str | list[Message]
    origin: str
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages."""
    id: str | float | None = None
    """What its user calls it."""

    def messages(self, system: str | None) -> list[Message]:
        chat = self.content
        if isinstance(chat, str):
            chat = [{"role": "user", "content": chat}]
        if system is None:
            return chat
        if any(message["role"] == "system" for message in chat):
            raise ValueError(f"{self.origin} has a system message of its own; leave --system out")
        return [{"role": "system", "content": system}, *chat]


def parse_template_args(words: Iterable[str]) -> dict[str, Any]:
    """What KEY=VALUE words say; a value is JSON, or else a text. Raises ValueError for other words."""
    args: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--template-args takes KEY=VALUE, got {word!r}")
        if name in args:
            raise ValueError(f"--template-args gives {name} twice")
        check_text(word, "--template-args")
        try:
            args[name] = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            args[name] = text
    return args


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def from_text(text: str, origin: str) -> Prompt:
    """A prompt that is a whole text. The newline that ends a text file does not belong to it."""
    text = text.removesuffix("\n")
    if not text:
        raise ValueError(f"the prompt is empty ({origin})")
    check_text(text, f"the prompt ({origin})")
    return Prompt(text, origin)


def from_stdin() -> Prompt:
    if sys.stdin is None:
        raise ValueError("there is no stdin to read the prompt from")
    if sys.stdin.isatty():
        print("reading the prompt from stdin, up to its end (Ctrl-D)", file=sys.stderr)
    return from_text(sys.stdin.read().removeprefix("\ufeff"), "stdin")


def from_jsonl(path: Path) -> list[Prompt]:
    """One prompt a line, {"prompt": TEXT} or {"messages": [{"role": TEXT, "content": TEXT}, ...]}, which may
    have "template_args": {...} and an "id", too; blank lines are skipped. Raises ValueError, with the line's
    number, for anything else."""
    lines = read_text(path).split("\n")
    prompts = [_from_json(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _from_json(line: str, origin: str) -> Prompt:
    entry = parse_json(line, f"{origin} is not JSON")
    asked = set(entry) - {"template_args", "id"} if isinstance(entry, dict) else set()
    if asked not in ({"prompt"}, {"messages"}):
        keys = f"keys {', '.join(entry)}" if isinstance(entry, dict) and entry else "no such object"
        raise ValueError(f'{origin} must be {{"prompt": ...}} or {{"messages": [...]}}, and has {keys}')
    template_args, name = entry.get("template_args", {}), entry.get("id")
    if not isinstance(template_args, dict):
        raise ValueError(f"{origin}: template_args must be an object, got {template_args!r}")
    if "id" in entry and (isinstance(name, bool) or not isinstance(name, str | int | float)):
        raise ValueError(f"{origin}: id must be a text or a number, got {name!r}")
    content = _text(entry, origin) if "prompt" in entry else _messages(entry, origin)
    return Prompt(content, origin, template_args, name)


def _text(entry: dict[str, Any], origin: str) -> str:
    text = entry["prompt"]
    if not isinstance(text, str) or not text:
        raise ValueError(f"{origin}: prompt must be a text that is not empty, got {text!r}")
    check_text(text, f"the prompt ({origin})")
    return text


def _messages(entry: dict[str, Any], origin: str) -> list[Message]:
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f'{origin}: messages must be a list of {{"role": TEXT, "content": TEXT}}')
    for text in (message[key] for message in messages for key in ("role", "content")):
        check_text(text, f"a message ({origin})")
    return messages


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))


def encode(tokenizer: Any, prompt: Prompt, *, raw: bool, system: str | None = None) -> list[int]:
    """The token ids of a prompt, by the tokenizer's chat template unless `raw`."""
    if raw:
        for what, there in (
            ("messages", not isinstance(prompt.content, str)),
            ("template_args", prompt.template_args),
        ):
            if there:
                raise ValueError(f"{prompt.origin} has {what}, which need the chat template; leave --raw out")
        assert isinstance(prompt.content, str)
        return encode_text(tokenizer, prompt.content)
    return encode_chat(tokenizer, prompt.messages(system), prompt.origin, prompt.template_args)
