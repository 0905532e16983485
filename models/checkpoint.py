"""Loading a checkpoint: a folder with config.json and safetensors files becomes a Transformer.

Names, shapes and dtypes of all tensors are checked before the first one is copied.
"""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel

from .config import ModelConfig, parse_config, parse_dtype
from .files import read_json_object
from .moe import Experts
from .parallel import part
from .quantize import check_quantize, make_room, quantize_into
from .transformer import Transformer

log = logging.getLogger(__name__)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PROGRESS_BYTES = 2 * 2**30

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a checkpoint, as the header of its file describes it."""

    file: Path
    dtype: str  # in the spelling of safetensors
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def load_checkpoint(
    folder: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    quantize: str | None = None,
    tp: TensorParallel = SINGLE_PROCESS,
) -> Transformer:
    """The model in `folder`, on `device` and in `dtype`; "auto" is the dtype of the checkpoint.

    With `quantize="int8"` the matrices of linear layers are quantized one by one while they are read. In a
    tensor-parallel group `tp` each process reads its own part of the model only. Beside the model itself,
    memory holds one tensor at a time.

    Raises FileNotFoundError for a missing file and ValueError for anything in the config or the files that is
    not understood or does not fit, for a device that cannot be used, or if the model cannot be quantized or
    split.
    """
    check_quantize(quantize)
    device = find_device(device)
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        model, whole = Transformer(config, tp), Transformer(config)

    tensors = _find_tensors(folder)
    shapes = {name: tuple(view.shape) for name, view in checkpoint_views(whole)}
    _check(folder, tensors, shapes, config.tie_embeddings, tp)
    chosen = config.stored_dtype if dtype == "auto" else parse_dtype(dtype)
    model.to(chosen or _DTYPES[tensors["model.embed_tokens.weight"].dtype])
    if quantize is not None:
        make_room(model)
    model.to_empty(device=device)
    model.bytes_read = _fill(dict(checkpoint_views(model)), tensors, tp)
    return model


def find_device(device: str | torch.device) -> torch.device:
    """The device of that name. Raises ValueError for one that cannot be used."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {str(device)!r} cannot be used: {reason}") from error


def read_config(folder: Path) -> ModelConfig:
    """What the config.json of a folder says, and its generation_config.json, if there is one.

    Raises FileNotFoundError, and ValueError, which names the file, for what is not understood.
    """
    file, generation = folder / "config.json", folder / "generation_config.json"
    raw, more = read_json_object(file), read_json_object(generation) if generation.exists() else None
    try:
        return parse_config(raw, more)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def checkpoint_views(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The name of every tensor that a checkpoint must have, with the parameter, or the part of one, that it
    fills. The scale of a quantized matrix follows it; no checkpoint has that one."""
    for path, module in model.named_modules():
        prefix = path + "." if path.startswith("lm_head") else f"model.{path}." if path else "model."
        if isinstance(module, Experts):
            views: Iterable[tuple[str, Tensor]] = module.checkpoint_views()
        else:
            views = module.named_parameters(recurse=False)
        for name, view in views:
            yield prefix + name, view


def read_header(file: Path) -> dict[str, FileTensor]:
    """The tensors of a safetensors file. Raises ValueError if the file is damaged."""
    try:
        with safe_open(file, framework="pt") as content:
            entries = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            return {
                name: FileTensor(file, entry.get_dtype(), tuple(entry.get_shape()))
                for name, entry in entries.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated, damaged or no safetensors file: {error}") from error


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files of a checkpoint, with the names of the tensors that the index takes from each.
    A single file comes first, as in transformers, with no names: all of its tensors count.

    Raises FileNotFoundError for a missing file and ValueError for an index that is not understood.
    """
    index, single = folder / INDEX, folder / SINGLE
    if single.exists():
        return {single: []}
    if not index.exists():
        raise FileNotFoundError(_nothing_to_load(folder))
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index} names a file outside its folder: {shard}")
        files.setdefault(folder / shard, []).append(name)
    for file in sorted(files):
        if not file.is_file():
            raise FileNotFoundError(f"shard {file.name} is missing from {folder}, though {INDEX} names it")
    return files


def _find_tensors(folder: Path) -> dict[str, FileTensor]:
    """Every tensor of the checkpoint, file by file."""
    tensors = {}
    files = weight_files(folder)
    if (folder / INDEX).exists() and folder / SINGLE in files:
        log.warning("%s has two sets of weights: %s is read, not what %s names", folder, SINGLE, INDEX)
    for file, names in files.items():
        header = read_header(file)
        for name in names or header:
            if name not in header:
                raise ValueError(f"tensor {name} is not in {file}, though {INDEX} says so")
            tensors[name] = header[name]
    return tensors


def _nothing_to_load(folder: Path) -> str:
    found = sorted(file.name for file in folder.iterdir())
    start = f"{folder} has neither {SINGLE} nor {INDEX}"
    if shards := [name for name in found if name.endswith(".safetensors")]:
        return f"{start}, so that nothing says which of its safetensors files to read: {', '.join(shards)}"
    if ggufs := [name for name in found if name.endswith(".gguf")]:
        return f"{start}. Convert its GGUF file first: python scripts/convert_gguf.py {folder / ggufs[0]} OUT"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in found):
        return (
            f"{start}, only pickled weights, which are not read. Save it once more with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return start


def _check(
    folder: Path, tensors: dict[str, FileTensor], shapes: Mapping[str, Shape], tied: bool, tp: TensorParallel
) -> None:
    """Leaves in `tensors` exactly those that `shapes` has, or raises ValueError."""
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        del tensors[name]  # in old checkpoints; it follows from the config
    missing = [name for name in shapes if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = ", and the config does not tie it to the embedding" if missing == ["lm_head.weight"] else ""
        raise ValueError(f"tensor {missing[0]}{more} is missing from the checkpoint in {folder}{hint}")
    head = tensors.pop("lm_head.weight", None) if tied else None
    for name, entry in tensors.items():
        where = f"tensor {name} in {entry.file}"
        if name not in shapes:
            raise ValueError(f"{where} has no place in this model")
        if entry.shape != shapes[name]:
            raise ValueError(
                f"{where} has shape {list(entry.shape)}, the config asks for {list(shapes[name])}"
            )
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{where} has dtype {entry.dtype}; supported: {', '.join(_DTYPES)}")
    if head is not None and not _same_rows(head, tensors["model.embed_tokens.weight"], tp):
        raise ValueError(
            f"tensor lm_head.weight in {head.file} differs from the embedding, to which the config ties "
            "it; set tie_word_embeddings to false in config.json to use it"
        )


def _same_rows(head: FileTensor, embedding: FileTensor, tp: TensorParallel) -> bool:
    """Whether they agree in the rows that this process of the group holds."""
    if head.shape != embedding.shape:
        return False
    both = {"lm_head.weight": head, "model.embed_tokens.weight": embedding}
    own = (head.shape[0] // tp.size, *head.shape[1:])
    return torch.equal(*(rows for _, rows in _read(both, dict.fromkeys(both, own), tp)))


def _read(
    tensors: Mapping[str, FileTensor], shapes: Mapping[str, Shape], tp: TensorParallel
) -> Iterator[tuple[str, Tensor]]:
    """This process's part of each tensor, of the shape given. No more of the files is read."""
    for file, names in itertools.groupby(tensors, lambda name: tensors[name].file):
        with safe_open(file, framework="pt", device="cpu") as content:
            for name in names:
                yield name, content.get_slice(name)[part(tensors[name].shape, shapes[name], tp)]


@torch.no_grad()
def _fill(views: dict[str, Tensor], tensors: Mapping[str, FileTensor], tp: TensorParallel) -> int:
    """Fills the parameters from the files; the number of bytes read."""
    from tqdm import tqdm  # comes with transformers; nothing else here needs it

    shapes = {name: tuple(view.shape) for name, view in views.items()}
    total, num_bytes = sum(entry.num_bytes for entry in tensors.values()), 0
    hide = total < _PROGRESS_BYTES or None  # None: unless stderr is a terminal
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=hide) as progress:
        for name, own in _read(tensors, shapes, tp):
            scale = views.pop(name.removesuffix("weight") + "scale", None)
            if scale is None:
                views.pop(name).copy_(own)
            else:
                split_columns = own.shape[1] < tensors[name].shape[1]
                quantize_into(own, views.pop(name), scale, tp if split_columns else SINGLE_PROCESS)
            progress.update(tensors[name].num_bytes)
            num_bytes += own.nbytes
    assert not views, f"not filled: {sorted(views)}"
    return num_bytes
