"""Text and JSON are read in one way everywhere, and what is no text is one error."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_tests.models.reference import tiny_checkpoint
from compile_tests.tiny_chat import tiny_tokenizer
from inertiakv.evals.data_files import load_dataset
from inertiakv.evals.essays import load_essays
from inertiakv.models import load_checkpoint
from inertiakv.models.encoding import encode_chat, encode_text
from inertiakv.models.files import disk_error, read_json, read_json_object, read_text
from inertiakv.scripts.benchmarking import results
from inertiakv.scripts.cli import prompts

MARK = b"\xef\xbb\xbf"


def rows_of(file: Path) -> Any:
    rows, _ = load_dataset("it", [file.name], {"text": str}, ("a/b", None, "test"), file.parent)
    return rows


READERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "text": ("a.txt", "höre", read_text),
    "JSON": ("a.json", '{"text": "höre"}', read_json),
    "prompts": ("a.jsonl", '{"prompt": "höre"}\n{"prompt": "b"}\n', prompts.from_jsonl),
    "essays": ("a.txt", "höre", lambda file: load_essays(str(file)).text),
    "essays in JSON": ("a.json", '{"text": "höre"}', lambda file: load_essays(str(file)).text),
    "rows": ("a.jsonl", '{"text": "höre"}\n', rows_of),
    "rows in JSON": ("a.json", '[{"text": "höre"}]', rows_of),
    "results": ("a.json", json.dumps(dict.fromkeys(results.NEEDED, 1)), results.read),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    file, content, read = READERS[name]
    (tmp_path / file).write_text(content, encoding="utf-8")
    expected = read(tmp_path / file)
    (tmp_path / file).write_bytes(MARK + content.encode())
    assert read(tmp_path / file) == expected


@pytest.mark.parametrize("name", READERS)
def test_what_is_not_utf8(tmp_path: Path, name: str) -> None:
    file, content, read = READERS[name]
    (tmp_path / file).write_bytes(content.encode().replace("ö".encode(), b"\xf6") + b"\xff")
    with pytest.raises(ValueError, match=f"{file} is not UTF-8 text"):
        read(tmp_path / file)


def test_configs_with_a_byte_order_mark(tmp_path: Path) -> None:
    expected = load_checkpoint(tiny_checkpoint(tmp_path)).config
    file = tmp_path / "config.json"
    file.write_bytes(MARK + file.read_bytes())
    (tmp_path / "generation_config.json").write_bytes(MARK + b"{}")
    assert load_checkpoint(tmp_path).config == expected


def test_json_that_is_no_object(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError, match=r"a\.json is missing"):
        read_json_object(file)
    for content, message in (("[]", "holds no JSON object"), ("[" * 100_000, "is not valid JSON")):
        file.write_text(content)
        with pytest.raises(ValueError, match=rf"a\.json {message}"):
            read_json_object(file)


@pytest.mark.parametrize("text", ["\ud800", "a\udcff", "\udfffb"])
def test_lone_surrogates(text: str) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="lone surrogate"):
        encode_text(tokenizer, text)
    with pytest.raises(ValueError, match="lone surrogate"):
        encode_chat(tokenizer, [{"role": "user", "content": text}])


@pytest.mark.parametrize(
    "line",
    [
        r'{"prompt": "\ud800"}',
        r'{"messages": [{"role": "user", "content": "\ud800"}]}',
        r'{"messages": [{"role": "\udfff", "content": "a"}]}',
    ],
)
def test_lone_surrogates_in_prompts(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2.*lone surrogate"):
        prompts.from_jsonl(tmp_path / "a.jsonl")


def test_what_the_disk_says() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert disk_error(full) is full
    wrapped = RuntimeError("cannot write")
    wrapped.__cause__ = full
    assert disk_error(wrapped) is full
    assert disk_error(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) is None
    assert disk_error(ValueError()) is None
