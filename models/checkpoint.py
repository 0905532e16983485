"""A folder of config.json and safetensors files -> a model. All is checked before anything is copied."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inertiakv.cache.memory import peak_bytes
from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel

from .config import parse_dtype
from .moe import Experts
from .parallel import part
from .parse import parse_config
from .quantize import check_quantize, make_room, quantize_into
from .transformer import Transformer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PROGRESS_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint, as its file's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Loaded:
    """What loading took, of this process."""

    num_bytes: int  # read of the tensors
    seconds: float
    peak_bytes: int  # of the host's memory, the most that the process has had


def load_checkpoint(
    folder: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    quantize: str | None = None,
    tp: TensorParallel = SINGLE_PROCESS,
) -> Transformer:
    """The model in `folder`, straight onto `device` in `dtype`; "auto" is the dtype that the checkpoint has.
    With `quantize="int8"` the matrices of its linear layers are quantised one by one as they are read. With
    `ranks` it is this rank's part, and no other part is read. `model.loaded` says what it took.

    Beside the model itself memory holds one tensor at a time. Raises FileNotFoundError for a file that is
    missing, ValueError for anything in the config or the files that is not understood or does not fit, and
    where `quantize` cannot be.
    """
    start = time.perf_counter()
    check_quantize(quantize)
    folder = Path(folder)
    generation = folder / "generation_config.json"
    config = parse_config(
        _read_json(folder / "config.json"), _read_json(generation) if generation.exists() else {}
    )
    with torch.device("meta"):
        model, whole = Transformer(config, tp), Transformer(config)

    stored = _find_tensors(folder)
    shapes = {name: tuple(view.shape) for name, view in checkpoint_views(whole)}
    _check(folder, stored, shapes, config.tie_embeddings, tp)
    wanted = config.stored_dtype if dtype == "auto" else parse_dtype(dtype)
    wanted = wanted or parse_dtype(_STORED_DTYPES[stored["model.embed_tokens.weight"].dtype])
    model.to(wanted)
    if quantize is not None:
        make_room(model)
    model.to_empty(device=torch.device(device))
    num_bytes = _fill(dict(checkpoint_views(model)), stored, tp)
    model.loaded = Loaded(num_bytes, time.perf_counter() - start, peak_bytes())
    return model


def checkpoint_views(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The name of every tensor that a checkpoint must have, and the parameter, or part of one, it fills.
    Where that is quantised its scale follows, which no checkpoint has."""
    for path, module in model.named_modules():
        prefix = path + "." if path.startswith("lm_head") else f"model.{path}." if path else "model."
        if isinstance(module, Experts):
            views: Iterable[tuple[str, Tensor]] = module.checkpoint_views()
        else:
            views = module.named_parameters(recurse=False)
        for name, view in views:
            yield prefix + name, view


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, from its header. Raises ValueError for a file that is damaged."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # A header larger than the file is no header; do not try to read it.
            header = json.loads(stream.read(length if length < size else 0))
        header.pop("__metadata__", None)
        entries = {
            name: Stored(
                file,
                entry["dtype"],
                tuple(entry["shape"]),
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
        expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{file} is not a safetensors file, or is cut off within its header") from error
    if size != expected:
        kind = "truncated" if size < expected else "damaged"
        raise ValueError(f"{file} is {kind}: its header describes {expected} bytes, the file has {size}")
    return entries


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _find_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint. An index alone decides which file a tensor comes from."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise FileNotFoundError(_nothing_to_load(folder))
        return read_header(folder / SINGLE)
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    headers = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{folder / INDEX} names a file outside its folder: {shard}")
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"shard {shard} is missing from {folder}, though {INDEX} names it")
        headers[shard] = read_header(folder / shard)
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ValueError(f"tensor {name} is not in {folder / shard}, though {INDEX} says so")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


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
    folder: Path,
    stored: dict[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
    tied: bool,
    tp: TensorParallel,
) -> None:
    """Leaves in `stored` exactly the tensors of `shapes`, or raises ValueError. Of a head that is stored
    though the config ties it a rank looks at its own rows alone."""
    for name in [name for name in stored if name.endswith("rotary_emb.inv_freq")]:
        del stored[name]  # old checkpoints keep it; it follows from the config
    missing = [name for name in shapes if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = ", and the config does not tie it to the embedding" if missing == ["lm_head.weight"] else ""
        raise ValueError(f"tensor {missing[0]}{more} is missing from the checkpoint in {folder}{hint}")
    head = stored.pop("lm_head.weight") if tied and "lm_head.weight" in stored else None
    for name, entry in stored.items():
        if name not in shapes:
            raise ValueError(f"tensor {name} in {entry.file} has no place in this model")
        where = f"tensor {name} in {entry.file}"
        if entry.shape != shapes[name]:
            raise ValueError(
                f"{where} has shape {list(entry.shape)}, the config asks for {list(shapes[name])}"
            )
        if entry.dtype not in _STORED_DTYPES:
            raise ValueError(f"{where} has dtype {entry.dtype}; supported: {', '.join(_STORED_DTYPES)}")
    if head is not None and not _same_rows(head, stored["model.embed_tokens.weight"], tp):
        raise ValueError(
            f"tensor lm_head.weight in {head.file} differs from the embedding, to which the config ties "
            "it; set tie_word_embeddings to false in config.json to use it"
        )


def _same_rows(head: Stored, embedding: Stored, tp: TensorParallel) -> bool:
    """Whether they agree in what the rank has of them."""
    if head.shape != embedding.shape:
        return False
    entries = {"lm_head.weight": head, "model.embed_tokens.weight": embedding}
    own = (head.shape[0] // tp.size, *head.shape[1:])
    return torch.equal(*(rows for _, rows in _read(entries, dict.fromkeys(entries, own), tp)))


def _read(
    stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], tp: TensorParallel
) -> Iterator[tuple[str, Tensor]]:
    """A rank's part, of the shape given, of each tensor, file by file. No more of the files is read."""
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name, entry in stored.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in names:
                yield name, tensors.get_slice(name)[part(stored[name].shape, shapes[name], tp)]


@torch.no_grad()
def _fill(views: dict[str, Tensor], stored: Mapping[str, Stored], tp: TensorParallel) -> int:
    """Fill a rank's model from its files; the number of bytes read."""
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    num_bytes = 0
    with _Progress(sum(entry.num_bytes for entry in stored.values())) as progress:
        for name, own in _read(stored, shapes, tp):
            scale = views.pop(name.removesuffix("weight") + "scale", None)
            if scale is None:
                views.pop(name).copy_(own)
            else:
                split = own.shape[1] < stored[name].shape[1]
                quantize_into(own, views.pop(name), scale, tp if split else SINGLE_PROCESS)
            progress.update(stored[name].num_bytes)
            num_bytes += own.nbytes
    assert not views, f"not filled: {sorted(views)}"
    return num_bytes


class _Progress:
    """A progress bar on stderr for a checkpoint that takes a while, if tqdm is there."""

    def __init__(self, total: int) -> None:
        self.bar: Any = None
        if total >= _PROGRESS_BYTES and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", file=sys.stderr)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, num_bytes: int) -> None:
        if self.bar is not None:
            self.bar.update(num_bytes)
