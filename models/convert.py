"""A GGUF file of a supported family -> a folder of safetensors, config and tokenizer.

The conversion itself is transformers'; here is what it leaves out of the metadata, which would silently make another
model: head sizes, expert sizes, RoPE scaling.
"""

import dataclasses
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from .checkpoint import load_checkpoint
from .rope import RopeConfig, inverse_frequencies

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")  # the format calls Mistral "llama", too


def convert_gguf(file: str | Path, target: str | Path, *, exist_ok: bool = False) -> None:
    """Writes the model of a GGUF file, dequantised to bfloat16, and its tokenizer to the folder `target`.

    The folder appears complete or not at all. If it is there already, that is an error, or with `exist_ok` it is left
    as it is: another process has been faster.

    Raises FileNotFoundError, FileExistsError, ValueError for a file that is not understood, RuntimeError where the
    packages that it takes are not installed.
    """
    file, target = Path(file), Path(target)
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"reading a GGUF file needs {' and '.join(missing)}: pip install 'inertiakv[gguf]'"
        )
    if not file.is_file():
        raise FileNotFoundError(f"no GGUF file {file}")
    if target.exists() and not exist_ok:
        raise FileExistsError(f"{target} exists already")
    metadata, rope_factors = _read_metadata(file)

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        _convert(file, scratch, metadata, rope_factors)
        load_checkpoint(scratch, device="meta")  # what we could not load later is an error now
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not (exist_ok and target.is_dir()):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_metadata(file: Path) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The metadata without the tokenizer's, the architecture's name taken off the keys; and RoPE factors, if any."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except ValueError as error:
        raise ValueError(f"{file} is not a GGUF file that can be read: {error}") from error
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ValueError(f"{file}: architecture {architecture!r} is not supported; supported: {supported}")
    prefix = f"{architecture}."
    metadata = {
        key.removeprefix(prefix): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(prefix)
    }
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            return metadata, torch.tensor(tensor.data, dtype=torch.float64)
    return metadata, None


def _convert(file: Path, target: Path, metadata: dict[str, Any], rope_factors: torch.Tensor | None) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    _complete(config, metadata, rope_factors)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    except NotImplementedError as error:
        raise ValueError(f"{file}: transformers does not convert this kind of file: {error}") from error
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def _complete(config: Any, metadata: dict[str, Any], rope_factors: torch.Tensor | None) -> None:
    """Puts into the config what transformers does not take from the metadata."""
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
            raise ValueError(f"RoPE scaling {kind!r} with {sorted(scaling) or 'its factors'} is not supported")
    if rope_factors is not None:
        rope |= _llama3_scaling(config, rope_factors)
    config.rope_parameters = {"rope_type": "default"} | rope


def _llama3_scaling(config: Any, rope_factors: torch.Tensor) -> dict[str, Any]:
    """The parameters behind a table of factors; all of Llama 3.1 to 3.3 have the same ones but for the largest."""
    llama3 = RopeConfig(
        "llama3",
        theta=config.rope_parameters["rope_theta"],
        factor=round(float(rope_factors.max()), 4),
        original_max_positions=8192,
    )
    plain = dataclasses.replace(llama3, type="default")
    head_dim = 2 * rope_factors.numel()
    expected = inverse_frequencies(plain, head_dim) / inverse_frequencies(llama3, head_dim)
    if not torch.allclose(expected.double(), rope_factors, rtol=1e-3):
        raise ValueError("the file's RoPE factors (rope_freqs.weight) are not those of Llama 3: not supported")
    return {
        "rope_type": "llama3",
        "factor": llama3.factor,
        "low_freq_factor": llama3.low_freq_factor,
        "high_freq_factor": llama3.high_freq_factor,
        "original_max_position_embeddings": llama3.original_max_positions,
    }
