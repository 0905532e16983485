"""A conversation as a safetensors file.

The tensors are the buffers of the cache and of the batch as they are, so that going on from them is exact;
the metadata says what they belong to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..cache.slot_cache import SlotCache
from ..requests.results import Seconds, Stats
from .batch import BatchState
from .generation import Conversation
from .runtime import Runtime

FORMAT = "inertiakv conversation 3"
"""Files of version 2 know the model by the sum of its embedding alone, and are refused."""
SAMPLES = 64
"""Numbers of each parameter, spread evenly over it, that the model is known by."""
_PLAIN = ("overfull", "tokens", "turn_step")  # what of a conversation is written as it is


def save(conversation: Conversation, path: str | Path) -> None:
    """Write a conversation, whole or not at all: a file that was there stays until the new one is complete.
    Raises ValueError for one whose K and V are spread over ranks, and OSError where it cannot be written."""
    if conversation.runtime.rule.tp.size > 1:
        raise ValueError("a conversation with a model on several ranks cannot be saved: none has all of it")
    tensors = _buffers(conversation.cache, conversation.batch)
    if conversation.logits_BV is not None:
        tensors["logits"] = conversation.logits_BV
    stats = dataclasses.asdict(conversation.stats)
    stats.pop("graphs")
    state = {
        **_identity(conversation.runtime),
        "slots": conversation.cache.shape.slots,
        **{name: getattr(conversation, name) for name in _PLAIN},
        "stopped": sorted(conversation.stopped),
        "stats": stats,
    }
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with _replacing(Path(path)) as unfinished:
        save_file(contiguous, unfinished, {"format": FORMAT, "state": json.dumps(state)})


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file in the same folder to write to, which takes the place of `path` once it is on the disk, and
    leaves nothing behind where it cannot."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        unfinished.touch(exist_ok=False)  # with the mode that new files have, which the library's have not
        mode = (path if path.exists() else unfinished).stat().st_mode
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.chmod(mode)
        unfinished.replace(path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, error)
        raise OSError(number, f"the conversation was not saved: {reason}", str(path)) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a new name last, where folders can be opened for that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(runtime: Runtime, path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state and the tensors of a saved conversation, for `restore`. Raises FileNotFoundError where there
    is no file, ValueError for one that is no conversation, or that another model, dtype or eviction rule
    made, and MemoryError where it does not fit."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no saved conversation at {path}")
    try:
        with safe_open(path, "pt", device=str(runtime.model.device)) as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata.get("format", ""))
            state = json.loads(metadata["state"])
            for name, ours in _identity(runtime).items():
                if state[name] != ours and name == "weights":
                    raise ValueError(f"{path} was saved with a model of the same sizes and other weights")
                if state[name] != ours:
                    theirs, ours = _differing(state[name], ours)
                    raise ValueError(f"{path} was saved with {name} {theirs}, this decoder has {ours}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        _check_complete(runtime, state, tensors)
        name = "prompt cache" if state["overfull"] else "decode cache"
        runtime.buffers.require_cache(name, _stats(state).batch, state["slots"])
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return state, tensors


def _differing(theirs: Any, ours: Any) -> tuple[Any, Any]:
    """Of two configs, the fields that differ."""
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return theirs, ours
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return tuple(", ".join(f"{name}={of.get(name)!r}" for name in names) for of in (theirs, ours))  # type: ignore[return-value]


def _check_format(path: str | Path, found: str) -> None:
    kind, _, version = FORMAT.rpartition(" ")
    if found.rpartition(" ")[0] != kind:
        raise ValueError(f"{path} is no saved conversation ({FORMAT!r} expected)")
    if found != FORMAT:
        raise ValueError(
            f"{path} is a conversation of version {found.rpartition(' ')[2]}, and this is version {version}: "
            "load it with the inertiakv that saved it, or read its prompt again"
        )


def restore(runtime: Runtime, state: dict[str, Any], tensors: dict[str, Tensor]) -> Conversation:
    """The conversation, in the place of the runtime's former one."""
    stats, slots = _stats(state), state["slots"]
    if state["overfull"]:
        cache = runtime.buffers.prompt_cache(stats.batch, slots - 1)
    else:
        cache = runtime.buffers.decode_cache(stats.batch, slots)
    cache.allocate()
    batch = runtime.buffers.batch_state(stats.batch)
    for name, buffer in _buffers(cache, batch).items():
        buffer.copy_(tensors[name])
    more = {**{name: state[name] for name in _PLAIN}, "stopped": set(state["stopped"])}
    return Conversation(runtime, cache, batch, stats, **more, logits_BV=tensors.get("logits"))


def _buffers(cache: SlotCache, batch: BatchState) -> dict[str, Tensor]:
    """The buffers by their names in a file."""
    parts = {"layers": cache.layers, "tables": cache.retention}
    return nn.ModuleDict({"cache": nn.ModuleDict(parts), "rows": batch}).state_dict()  # type: ignore[arg-type]


def _stats(state: dict[str, Any]) -> Stats:
    return Stats(**{**state["stats"], "seconds": Seconds(**state["stats"]["seconds"])})


def _check_complete(runtime: Runtime, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Raise for a state or a tensor that is missing, of another shape or of another dtype."""
    stats = _stats(state)
    for name in (*_PLAIN, "stopped"):
        state[name]
    shape = runtime.buffers.shape(stats.batch, state["slots"])
    cache = SlotCache(shape, dtype=runtime.model.dtype, device="meta")
    for name, buffer in _buffers(cache, BatchState(stats.batch, torch.device("meta"))).items():
        tensor = tensors[name]
        if (tensor.shape, tensor.dtype) != (buffer.shape, buffer.dtype):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)} in the saved conversation")


def _identity(runtime: Runtime) -> dict[str, Any]:
    """What a conversation belongs to: sizes and dtype of the model, a checksum of its weights, the eviction
    rule."""
    model, eviction = runtime.model, runtime.rule.config
    sizes = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size", "windows")
    rule = None if eviction is None else dataclasses.asdict(eviction)
    return {
        "model": {name: json.loads(json.dumps(getattr(model.config, name))) for name in sizes},
        "rope": repr(getattr(model.config, "rope", None)),
        "weights": _checksum(model) if isinstance(model, nn.Module) else "",
        "dtype": str(model.dtype),
        "eviction": json.loads(json.dumps(rule)),
    }


def _checksum(model: nn.Module) -> str:
    """Of the stored bits of `SAMPLES` numbers of every parameter. Bits and not sums, which devices round in
    ways of their own, and a few numbers rather than all: training, or merging an adapter, changes nearly
    every number of a matrix."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        numbers = _spread(parameter.detach()).cpu()
        found.update(f"{name} {list(parameter.shape)} {numbers.dtype}".encode())
        found.update(numbers.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _spread(x: Tensor) -> Tensor:
    """Numbers of a tensor, from the first to the last, spread evenly over it: a copy of no more than them."""
    count = min(x.numel(), SAMPLES)
    at = [index * (x.numel() - 1) // max(1, count - 1) for index in range(count)]
    if not x.is_contiguous():  # as it would lie in row order
        return x[torch.unravel_index(torch.tensor(at, device=x.device), x.shape)] if x.dim() else x.view(1)
    return x.view(-1)[torch.tensor(at, dtype=torch.int64, device=x.device)]
