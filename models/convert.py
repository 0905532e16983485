"""Converts a GGUF file of a supported family into a folder of safetensors, config and tokenizer.

transformers does the conversion. This module adds the metadata that transformers ignores and that would
silently make another model: head dim, expert size, RoPE scaling.
"""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .checkpoint import load_checkpoint
from .config import unite_ids
from .extras import OF_GGUF, install, missing
from .files import disk_error
from .rope import RopeConfig, inverse_frequencies

log = logging.getLogger(__name__)

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")  # the format calls Mistral "llama", too
_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(file: str | Path, target: str | Path, *, exist_ok: bool = False) -> None:
    """Writes the model in a GGUF file, dequantized to bfloat16, and its tokenizer to the folder `target`.

    The folder appears complete or not at all. An existing folder is an error; with `exist_ok` it is left as
    it is, since another process may have been faster. Takes about six bytes of memory per parameter.

    Raises FileNotFoundError, FileExistsError, ValueError for a file that is not understood, RuntimeError if
    packages are missing.
    """
    file, target = Path(file), Path(target)
    check_packages()
    import transformers

    if not hasattr(transformers, "GgufConfig"):
        raise RuntimeError(f"reading a GGUF file needs a later transformers than {transformers.__version__}")
    if not file.is_file():
        raise FileNotFoundError(f"no GGUF file {file}")
    if target.exists() and not exist_ok:
        raise FileExistsError(f"{target} exists already")
    reader = _open(file)

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        with _naming(file):
            _convert(file, scratch, reader)
            load_checkpoint(scratch, device="meta")  # fails now if the result could not be loaded later
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError as error:
            if not (exist_ok and target.is_dir()):
                raise
            log.info("%s is another process's, which was faster (%s)", target, error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_packages() -> None:
    """Raises RuntimeError for packages that are missing."""
    if lacking := missing(*OF_GGUF):
        raise RuntimeError(f"reading a GGUF file needs {lacking}: {install('gguf')}")


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Whatever a damaged file leads to, as a ValueError that names it."""
    try:
        yield
    except (ValueError, ImportError, MemoryError) as error:
        if isinstance(error, ValueError) and str(file) not in str(error):
            raise ValueError(f"{file}: {error}") from error
        raise
    except Exception as error:
        if disk_error(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} cannot be converted: {reason}") from error


def _open(file: Path) -> Any:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        found = reader.fields.get("general.architecture")
        architecture = found and found.contents()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # where the file is cut or damaged, whatever reading beyond its end raises
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is not a GGUF file that can be read: {reason}") from error
    if architecture is None:
        raise ValueError(f"{file} does not name its architecture: general.architecture is missing")
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ValueError(f"{file}: architecture {architecture!r} is not supported; supported: {supported}")
    return reader


def _convert(file: Path, target: Path, reader: Any) -> None:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    _complete(config, reader)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=config,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except NotImplementedError as error:
        raise ValueError(f"{file}: transformers does not convert this kind of file: {error}") from error
    model, report = loaded
    # transformers initialises missing tensors and drops unknown ones without an error.
    if report["missing_keys"]:
        raise ValueError(
            f"{file} lacks {', '.join(sorted(report['missing_keys']))}; is it one part of several?"
        )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_weights = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != _ROPE_FACTORS)
    if num_parameters != num_weights:
        raise ValueError(
            f"{file} has {num_weights} weights, "
            f"but a {config.model_type} model of its sizes has {num_parameters}"
        )
    if eos := _end_ids(reader):
        model.generation_config.eos_token_id = list(eos)
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
    for made in target.iterdir():
        made.chmod(0o644)  # safetensors makes its files readable for their owner only


def _end_ids(reader: Any) -> tuple[int, ...]:
    """The ids that end an answer: of the sequence, of a turn, of a message."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return unite_ids(*(int(reader.fields[key].contents()) for key in keys if key in reader.fields))


def _complete(config: Any, reader: Any) -> None:
    """Adds to the config what transformers does not take from the metadata."""
    prefix = reader.fields["general.architecture"].contents() + "."
    metadata = {
        key.removeprefix(prefix): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(prefix)
    }
    if "attention.key_length" in metadata:
        config.head_dim = metadata["attention.key_length"]
    if "expert_feed_forward_length" in metadata:
        config.moe_intermediate_size = metadata["expert_feed_forward_length"]

    rope: dict[str, Any] = {"rope_theta": config.rope_parameters["rope_theta"]}
    scaling = {key: value for key, value in metadata.items() if key.startswith("rope.scaling.")}
    kind = scaling.pop("rope.scaling.type", "none")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": scaling.pop("rope.scaling.factor", None)}
        original = scaling.pop("rope.scaling.original_context_length", None)
        if kind == "yarn" and original is not None:
            rope["original_max_position_embeddings"] = original
        scaling.pop("rope.scaling.finetuned", None)
        if kind not in ("linear", "yarn") or scaling:
            raise ValueError(
                f"RoPE scaling {kind!r} with {sorted(scaling) or 'its factors'} is not supported"
            )
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            rope |= _llama3_scaling(rope["rope_theta"], torch.tensor(tensor.data, dtype=torch.float64))
    config.rope_parameters = {"rope_type": "default"} | rope


def _llama3_scaling(theta: float, rope_factors: torch.Tensor) -> dict[str, Any]:
    """The RoPE parameters that give these factors; Llama 3.1 to 3.3 differ in the largest factor only."""
    llama3 = {
        "rope_type": "llama3",
        "factor": round(float(rope_factors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = RopeConfig.from_dict(
        {"max_position_embeddings": 131072, "rope_theta": theta, "rope_scaling": llama3}
    )
    head_dim = 2 * rope_factors.numel()
    plain_R = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    expected_R = plain_R / inverse_frequencies(rope, head_dim)
    if not torch.allclose(expected_R.double(), rope_factors, rtol=1e-3):
        raise ValueError(f"the file's RoPE factors ({_ROPE_FACTORS}) are not those of Llama 3: not supported")
    return llama3
