"""A conversation as a safetensors file.

The tensors are the buffers of the cache and of the rows as they are, so that going on from them is exact; the
metadata says what they belong to.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .cache import SlotCache
from .experimental import AdaptiveAlpha
from .results import Seconds, Stats
from .rows import Rows

if TYPE_CHECKING:
    from .decoder import Decoder

FORMAT = "inertiakv conversation 2"


def save(decoder: Decoder, path: str | Path) -> None:
    """Write a decoder's conversation. Raises ValueError where there is none."""
    cache = decoder._conversation()
    tensors = {f"cache.{name}": tensor for name, tensor in cache.state_dict().items()}
    tensors |= {f"rows.{name}": tensor for name, tensor in decoder.rows.state_dict().items()}
    if decoder._logits_BV is not None:
        tensors["logits"] = decoder._logits_BV
    stats = dataclasses.asdict(decoder.stats)
    stats.pop("graphs")
    state = {
        **_identity(decoder),
        "slots": cache.shape.slots,
        "overfull": decoder._overfull,
        "tokens": decoder._tokens,
        "turn_step": decoder._turn_step,
        "stopped": sorted(decoder._stopped),
        "alpha": _chosen_alpha(decoder),
        "stats": stats,
    }
    save_file(
        {name: t.contiguous() for name, t in tensors.items()},
        path,
        {"format": FORMAT, "state": json.dumps(state)},
    )


def load(decoder: Decoder, path: str | Path) -> None:
    """Put a saved conversation in the place of a decoder's own. Raises ValueError for a file that is none, or
    that another model, dtype or eviction rule made; then the decoder's own conversation stays."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no saved conversation at {path}")
    try:
        with safe_open(path, "pt", device=str(decoder.model.device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is no saved conversation ({FORMAT!r} expected)")
            state = json.loads(metadata["state"])
            for name, ours in _identity(decoder).items():
                if state[name] != ours:
                    raise ValueError(f"{path} was saved with {name} {state[name]}, this decoder has {ours}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            _check_complete(decoder, state, tensors)
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    _restore(decoder, state, tensors)


def _stats(state: dict[str, Any]) -> Stats:
    return Stats(**{**state["stats"], "seconds": Seconds(**state["stats"]["seconds"])})


def _check_complete(decoder: Decoder, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Raise for a state or a tensor that is missing, of another shape or of another dtype."""
    stats = _stats(state)
    for name in ("overfull", "tokens", "turn_step", "stopped"):
        state[name]
    shape = decoder.buffers.shape(stats.batch, state["slots"])
    cache = SlotCache(shape, dtype=decoder.model.dtype, device="meta")
    for prefix, module in (("cache.", cache), ("rows.", Rows(stats.batch, torch.device("meta")))):
        for name, buffer in module.state_dict().items():
            tensor = tensors[prefix + name]
            if (tensor.shape, tensor.dtype) != (buffer.shape, buffer.dtype):
                raise ValueError(
                    f"{prefix + name} is {tensor.dtype} {list(tensor.shape)} in the saved conversation"
                )


def _restore(decoder: Decoder, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    decoder._forget()
    decoder.stats = _stats(state)
    batch, slots = decoder.stats.batch, state["slots"]
    if state["overfull"]:
        cache = decoder.buffers.prompt_cache(batch, slots - 1)
    else:
        cache = decoder.buffers.decode_cache(batch, slots)
    cache.allocate()
    rows: Rows = decoder._rows_for(batch)
    with torch.no_grad():
        for prefix, module in (("cache.", cache), ("rows.", rows)):
            for name, buffer in module.state_dict().items():
                buffer.copy_(tensors[prefix + name])
    decoder.cache, decoder.rows, decoder._logits_BV = cache, rows, tensors.get("logits")
    decoder._overfull, decoder._turn_step = state["overfull"], state["turn_step"]
    decoder._tokens, decoder._stopped = state["tokens"], set(state["stopped"])
    if decoder._warming_up and state.get("alpha") is not None:
        decoder._smooth(state["alpha"])
        decoder._warming_up = False


def _chosen_alpha(decoder: Decoder) -> float | None:
    """What `AdaptiveAlpha` has chosen in this conversation; a warm-up that has not ended begins anew."""
    if not isinstance(decoder.eviction, AdaptiveAlpha) or decoder._warming_up:
        return None
    assert decoder.aggregation is not None
    return decoder.aggregation.alpha


def _identity(decoder: Decoder) -> dict[str, Any]:
    """What a conversation cannot do without: the sizes of the model, its dtype, the eviction rule."""
    config = decoder.model.config
    sizes = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size", "windows")
    embedding = (
        next(decoder.model.parameters()) if isinstance(decoder.model, torch.nn.Module) else torch.zeros(1)
    )
    eviction = None if decoder.eviction is None else dataclasses.asdict(decoder.eviction)
    return {
        "model": {name: json.loads(json.dumps(getattr(config, name))) for name in sizes},
        "rope": repr(getattr(config, "rope", None)),
        # Tells models of the same sizes apart; rounded, since devices add up in another order.
        "weights": f"{embedding.double().abs().sum().item():.6g}",
        "dtype": str(decoder.model.dtype),
        "eviction": json.loads(json.dumps(eviction)),
    }
