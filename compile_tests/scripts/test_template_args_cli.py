"""--template-args of scripts/decode.py and scripts/eval.py, and texts that are none."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from compile_tests.evals.fake_benchmarks import BENCHMARKS, ESSAYS
from compile_tests.models.test_template_args import THINKING
from compile_tests.scripts.test_decode_cli import Cli, Result
from compile_tests.tiny_chat import tiny_chat
from inertiakv.evals import registry
from inertiakv.scripts import decode
from inertiakv.scripts import eval as script
from inertiakv.scripts.cli.prompts import parse_template_args

TOLD = ("--template-args", "enable_thinking=false")
SHORT = ("--max-new-tokens", 1, "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_chat(tmp_path_factory.mktemp("model"), max_positions=512)
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: object, main: object = decode.main) -> Result:
        assert callable(main)
        code = main([*map(str, argv), "--model", str(folder), "--no-compile"])
        return Result(code, *capsys.readouterr())

    return run


def test_words() -> None:
    words = ["a=false", "b=no", "c=[1]", "d=", "e=x=y", 'f="1"', "g=NaN", "h=2"]
    expected = {"a": False, "b": "no", "c": [1], "d": "", "e": "x=y", "f": "1", "g": "NaN", "h": 2}
    assert parse_template_args(words) == expected
    for wrong, message in (("a", "KEY=VALUE"), ("=1", "KEY=VALUE"), ("a-b=1", "KEY=VALUE")):
        with pytest.raises(ValueError, match=message):
            parse_template_args([wrong])
    with pytest.raises(ValueError, match="gives a twice"):
        parse_template_args(["a=1", "a=2"])


def test_an_argument_for_all_prompts_and_one_for_a_line(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    off, on = ({"prompt": "a", "template_args": {"enable_thinking": value}} for value in (False, True))
    file.write_text("\n".join(map(json.dumps, [{"prompt": "a"}, off, on])))

    def lengths(*argv: object) -> list[int]:
        rows = cli("--prompts-jsonl", file, *SHORT, *argv).json["rows"]
        return [row["prompt_tokens"] for row in rows]

    plain, longer, same = lengths()
    assert (longer, same) == (plain + len("<none>"), plain)
    assert lengths("--template-args", "enable_thinking=false") == [longer, longer, plain]
    (row,) = cli("--prompt", "a", *SHORT, "--template-args", "enable_thinking=false").json["rows"]
    assert row["prompt_tokens"] == longer


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--template-args", "thinking=false"], "does not use 'thinking'; it uses enable_thinking"),
        (["--template-args", "enable_thinking"], "--template-args takes KEY=VALUE, got 'enable_thinking'"),
        (["--template-args", "a=1", "--template-args", "a=1"], "gives a twice"),
        (["--template-args", "enable_thinking=1", "--raw"], "--template-args has no effect with --raw"),
        (["--system", "\ud800"], "--system is not UTF-8 text"),
        (["--stop", "\ud800"], "--stop is not UTF-8 text"),
    ],
)
def test_errors(argv: list[str], message: str, cli: Cli) -> None:
    assert message in cli("--prompt", "a", *argv).error


@pytest.mark.parametrize(
    "line,message",
    [
        ('{"prompt": "a", "template_args": 5}', "line 1: template_args must be an object, got 5"),
        ('{"template_args": {}}', "line 1 must be"),
        ('{"prompt": "a", "template_args": {"b": 1}}', "does not use 'b'"),
        (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "a message .*line 1.* is not UTF-8 text"),
    ],
)
def test_lines(line: str, message: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    assert re.search(message, cli("--prompts-jsonl", tmp_path / "a.jsonl").error)


def test_arguments_of_a_line_with_raw(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "template_args": {"enable_thinking": 1}}')
    error = cli("--prompts-jsonl", tmp_path / "a.jsonl", "--raw").error
    assert "line 1 has template_args, which need the chat template" in error


def test_byte_order_marks(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cli("--prompt", "abc", *SHORT).json["rows"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc\n")
    assert cli("--prompt-file", tmp_path / "a.txt", *SHORT).json["rows"] == plain
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffabc\n"))
    assert cli("-", *SHORT).json["rows"] == plain


def test_a_run_of_benchmarks(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BENCHMARKS", BENCHMARKS)
    monkeypatch.setattr(script, "load_essays", lambda source: ESSAYS)
    out, told = tmp_path / "out", TOLD
    argv = ["--tasks", "made", "--lengths", 100, "--samples", 1, "--out", out]
    wrong = cli(*argv, "--template-args", "a=1", main=script.main)
    assert "does not use 'a'" in wrong.error
    none = cli(*argv, *told, "--template", "none", main=script.main)
    assert "--template-args has no effect with --template none" in none.error
    assert cli(*argv, *told, main=script.main).code == 0
    meta = json.loads((out / "run_meta.json").read_text())
    assert meta["template"]["args"] == {"enable_thinking": False}
    assert meta["config"]["template_args"] == ["enable_thinking=false"]
    assert "template.args" in cli(*argv, "--resume", main=script.main).error
    assert cli(*argv, *told, "--resume", main=script.main).code == 0


def test_a_run_without_arguments_is_described_as_before(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BENCHMARKS", BENCHMARKS)
    monkeypatch.setattr(script, "load_essays", lambda source: ESSAYS)
    argv = ["--tasks", "made", "--lengths", 100, "--samples", 1, "--out", tmp_path / "out"]
    assert cli(*argv, main=script.main).code == 0
    meta = json.loads((tmp_path / "out" / "run_meta.json").read_text())
    assert "args" not in meta["template"]
    assert "template_args" not in meta["config"]
    assert "config.template_args" in cli(*argv, *TOLD, "--resume", main=script.main).error
