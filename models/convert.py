"""A GGUF file of a supported family -> a folder of safetensors, config and tokenizer.

The conversion itself is transformers'; here is what it leaves out of the metadata, which would silently make
another model: head sizes, expert sizes, RoPE scaling.
"""

import dataclasses
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint import load_checkpoint
from .rope import RopeConfig, inverse_frequencies

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")  # the format calls Mistral "llama", too
_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(file: str | Path, target: str | Path, *, exist_ok: bool = False) -> None:
    """Writes the model of a GGUF file, dequantised to bfloat16, and its tokenizer to the folder `target`.

    The folder appears complete or not at all. If it is there already, that is an error, or with `exist_ok` it
    is left as it is: another process has been faster. Takes about six bytes of memory a parameter.

    Raises FileNotFoundError, FileExistsError, ValueError for a file that is not understood, RuntimeError
    where the packages that it takes are not installed.
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
    header = _read_header(file)

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        _convert(file, scratch, header)
        load_checkpoint(scratch, device="meta")  # what we could not load later is an error now
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not (exist_ok and target.is_dir()):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, Any]  # without the tokenizer's, and with the architecture's name taken off the keys
    num_values: int  # in all tensors that are weights
    rope_factors: torch.Tensor | None


def _read_header(file: Path) -> _Header:
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
    factors = [tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]
    return _Header(
        metadata,
        sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != _ROPE_FACTORS),
        torch.tensor(factors[0].data, dtype=torch.float64) if factors else None,
    )


def _convert(file: Path, target: Path, header: _Header) -> None:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not hasattr(transformers, "GgufConfig"):
        raise RuntimeError(f"reading a GGUF file needs a later transformers than {transformers.__version__}")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    _complete(config, header)
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
    # What the file lacks transformers makes up, and what it does not know it drops, both without an error.
    if report["missing_keys"]:
        raise ValueError(
            f"{file} lacks {', '.join(sorted(report['missing_keys']))}; is it one part of several?"
        )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters != header.num_values:
        raise ValueError(
            f"{file} has {header.num_values} weights, "
            f"but a {config.model_type} model of its sizes has {num_parameters}"
        )
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
    for made in target.iterdir():
        made.chmod(0o644)  # safetensors leaves its files to their owner alone


def _complete(config: Any, header: _Header) -> None:
    """Puts into the config what transformers does not take from the metadata."""
    metadata = header.metadata
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
    if header.rope_factors is not None:
        rope |= _llama3_scaling(config, header.rope_factors)
    config.rope_parameters = {"rope_type": "default"} | rope


def _llama3_scaling(config: Any, rope_factors: torch.Tensor) -> dict[str, Any]:
    """The parameters behind a table of factors; Llama 3.1 to 3.3 differ in the largest factor alone."""
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
        raise ValueError(f"the file's RoPE factors ({_ROPE_FACTORS}) are not those of Llama 3: not supported")
    return {
        "rope_type": "llama3",
        "factor": llama3.factor,
        "low_freq_factor": llama3.low_freq_factor,
        "high_freq_factor": llama3.high_freq_factor,
        "original_max_position_embeddings": llama3.original_max_positions,
    }
