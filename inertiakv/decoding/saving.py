"""A conversation as a safetensors file.

The tensors are the buffers of the cache and of the batch as they are, so that going on from them is exact;
the metadata says what they belong to.
"""

from __future__ import annotations

import dataclasses
import json
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
_PLAIN = ("overfull", "tokens", "turn_step")  # what of a conversation is written as it is


def save(conversation: Conversation, path: str | Path) -> None:
    """Write a conversation. Raises ValueError for one whose K and V are spread over ranks, and OSError where
    the file cannot be written."""
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
    try:
        save_file(contiguous, path, {"format": FORMAT, "state": json.dumps(state)})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def read(runtime: Runtime, path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state and the tensors of a saved conversation, for `restore`. Raises FileNotFoundError where there
    is no file, ValueError for one that is no conversation, or that another model, dtype or eviction rule
    made, and MemoryError where it does not fit."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no saved conversation at {path}")
    try:
        with safe_open(path, "pt", device=str(runtime.model.device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is no saved conversation ({FORMAT!r} expected)")
            state = json.loads(metadata["state"])
            for name, ours in _identity(runtime).items():
                if state[name] != ours:
                    raise ValueError(f"{path} was saved with {name} {state[name]}, this decoder has {ours}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            # Files that were written before rows could fail do not have it.
            tensors.setdefault("rows.failed_B", torch.zeros_like(tensors["rows.finished_B"]))
        _check_complete(runtime, state, tensors)
        rows, slots = _stats(state).batch, state["slots"]
        prompt_slots, decode_slots = (slots, 0) if state["overfull"] else (0, slots)
        runtime.buffers.require(rows, prompt_slots, decode_slots, chunk=0)
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return state, tensors


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
    embedding = next(model.parameters()) if isinstance(model, torch.nn.Module) else torch.zeros(1)
    rule = None if eviction is None else dataclasses.asdict(eviction)
    return {
        "model": {name: json.loads(json.dumps(getattr(model.config, name))) for name in sizes},
        "rope": repr(getattr(model.config, "rope", None)),
        # Tells models of the same sizes apart; rounded, since devices add up in another order.
        "weights": f"{embedding.double().abs().sum().item():.6g}",
        "dtype": str(model.dtype),
        "eviction": json.loads(json.dumps(rule)),
    }
