"""Where prompts come from, and which of them take the chat template."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inertiakv.models.encoding import Message, encode_chat, encode_text


@dataclass(frozen=True)
class Prompt:
    """One prompt: a text, or the messages of a chat. `origin` says in errors which one it is."""

    content: str | list[Message]
    origin: str

    def messages(self, system: str | None) -> list[Message]:
        chat = self.content
        if isinstance(chat, str):
            chat = [{"role": "user", "content": chat}]
        if system is None:
            return chat
        if any(message["role"] == "system" for message in chat):
            raise ValueError(f"{self.origin} has a system message of its own; leave --system out")
        return [{"role": "system", "content": system}, *chat]


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from error


def from_text(text: str, origin: str) -> Prompt:
    """A prompt that is a whole text. The newline that ends a text file does not belong to it."""
    text = text.removesuffix("\n")
    if not text:
        raise ValueError(f"the prompt is empty ({origin})")
    _check_text(text, origin)
    return Prompt(text, origin)


def _check_text(text: str, origin: str) -> None:
    """Raise ValueError for bytes that are no text: Python reads them as lone surrogates."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"the prompt is not UTF-8 text ({origin})")


def from_stdin() -> Prompt:
    if sys.stdin is None:
        raise ValueError("there is no stdin to read the prompt from")
    if sys.stdin.isatty():
        print("reading the prompt from stdin, up to its end (Ctrl-D)", file=sys.stderr)
    return from_text(sys.stdin.read(), "stdin")


def from_jsonl(path: Path) -> list[Prompt]:
    """One prompt a line, {"prompt": TEXT} or {"messages": [{"role": TEXT, "content": TEXT}, ...]}; blank
    lines are skipped. Raises ValueError, with the line's number, for anything else."""
    lines = read_text(path).split("\n")
    prompts = [_from_json(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _from_json(line: str, origin: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not JSON: {error}") from error
    if not isinstance(entry, dict) or len(entry) != 1 or not entry.keys() <= {"prompt", "messages"}:
        keys = f"keys {', '.join(entry)}" if isinstance(entry, dict) and entry else "no such object"
        raise ValueError(f'{origin} must be {{"prompt": ...}} or {{"messages": [...]}}, and has {keys}')
    if "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"{origin}: prompt must be a text that is not empty, got {text!r}")
        _check_text(text, origin)
        return Prompt(text, origin)
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f'{origin}: messages must be a list of {{"role": TEXT, "content": TEXT}}')
    return Prompt(messages, origin)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))


def encode(tokenizer: Any, prompt: Prompt, *, raw: bool, system: str | None = None) -> list[int]:
    """The token ids of a prompt, by the tokenizer's chat template unless `raw`."""
    if raw:
        if not isinstance(prompt.content, str):
            raise ValueError(f"{prompt.origin} has messages, which need the chat template; leave --raw out")
        return encode_text(tokenizer, prompt.content)
    return encode_chat(tokenizer, prompt.messages(system), prompt.origin)
