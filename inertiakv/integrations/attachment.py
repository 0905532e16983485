"""Our attention function in a model of transformers, for the passes that have an InertiaCache.

It stays in the model, and keeps nothing of a request: K that an InertiaCache hands on says which one it is
from, and other K goes to the function that the model had. Threads may use the model at once, with caches of
their own or other ones.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..attention.dense import Softmax
from .checks import NAME
from .layerwise import Attention

if TYPE_CHECKING:
    from .transformers import InertiaCache

_EVERY_TOKEN = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""The mask of a pass without padding."""


class HandedOver(Tensor):
    """K that an InertiaCache has handed on."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    cache: InertiaCache

    @classmethod
    def by(cls, cache: InertiaCache, k_BGTD: Tensor) -> HandedOver:
        handed = k_BGTD.as_subclass(cls)
        handed.cache = cache
        return handed


class AttentionConfig:
    """The model's config, to an attention layer that looks for the name of its attention function."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self.__dict__["of_model"] = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "of_model":  # not there yet: a copy of it is being made
            raise AttributeError(name)
        return getattr(self.of_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.of_model, name, value)


def attach(model: nn.Module) -> None:
    """Name our function to a model's attention layers, once. All else of the model, its config too, stays as
    it is."""
    for name, module in list(model.named_modules()):
        config = getattr(module, "config", None)
        if isinstance(module, PreTrainedModel) or not hasattr(module, "layer_idx"):
            continue
        if isinstance(config, PreTrainedConfig):
            module.config = AttentionConfig(config)
            _hook(_owner(model, name))


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The innermost model that has this layer: the one that makes masks for it."""
    parts = name.split(".")
    parents = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) - 1, -1, -1))
    return next(parent for parent in parents if isinstance(parent, PreTrainedModel))


def _hook(owner: nn.Module) -> None:
    if _keep_mask not in owner._forward_pre_hooks.values():
        owner.register_forward_pre_hook(_keep_mask, with_kwargs=True)


def _keep_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the mask of a pass with an InertiaCache, [B, S], come to the attention function. With four
    dimensions it is handed through, and becomes no mask of queries and keys."""
    from .transformers import InertiaCache

    if not any(isinstance(value, InertiaCache) for value in kwargs.values()):
        return None
    if any(isinstance(value, Tensor) and value.shape[1:2] == (0,) for value in (*args, *kwargs.values())):
        raise ValueError("nothing new: a further turn takes the whole conversation, as with other caches")
    mask_BS = kwargs.get("attention_mask")
    if mask_BS is None:
        return args, {**kwargs, "attention_mask": _EVERY_TOKEN}
    if isinstance(mask_BS, Tensor) and mask_BS.dim() == 2:
        return args, {**kwargs, "attention_mask": mask_BS[:, None, None]}
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function, [B, T, H, D]."""
    if isinstance(key, HandedOver):
        return _evicting_attention(module, query, key, value, attention_mask, **kwargs)
    config: Any = module.config
    if not isinstance(config, AttentionConfig) or config.of_model._attn_implementation == NAME:
        raise ValueError(
            f"attn_implementation={NAME!r} is set by InertiaCache alone: set another one, and call generate "
            "with past_key_values=InertiaCache(model, ...)"
        )
    name = config.of_model._attn_implementation
    if name == "eager":
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = AttentionInterface()[name]
    out: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **kwargs)
    return out


@torch.compiler.disable(reason="InertiaCache runs as it is: compile without fullgraph=True")
def _evicting_attention(
    module: nn.Module,
    query: Tensor,
    key: HandedOver,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    cache, config = key.cache, module.config
    if not isinstance(config, AttentionConfig) or not cache.is_of(config.of_model):
        cache.broken_off()
        raise ValueError(f"this InertiaCache was made for another model than that of {type(module).__name__}")
    k_BGTD = key.as_subclass(Tensor)
    with_gradients = torch.is_grad_enabled() and (query.requires_grad or k_BGTD.requires_grad)
    mask = attention_mask
    for wrong, what in (
        (module.training or with_gradients, "train: call model.eval(), and the model under torch.no_grad()"),
        (
            kwargs.get("output_attentions") or config.output_attentions,
            "return attention weights: leave out output_attentions",
        ),
        (kwargs.get("position_bias") is not None, "attend with position biases"),
        (
            mask is None or mask.dim() != 4 or mask.shape[1:3] != (1, 1),
            "take a mask of its own: give a 2D one",
        ),
        (not getattr(module, "is_causal", True), "look ahead"),
    ):
        if wrong:
            cache.broken_off()
            raise ValueError(f"a model with an InertiaCache cannot {what}")
    assert mask is not None
    mask_BS = None if mask.numel() == 1 else mask[:, 0, 0].bool()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softmax = None if softcap is None and s_aux is None else Softmax(softcap, s_aux)
    attention = Attention(sliding_window, scale, softmax)
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):  # which gives each of them a dtype of its own
        dtype = torch.get_autocast_dtype(device_type)
        query, k_BGTD, value = query.to(dtype), k_BGTD.to(dtype), value.to(dtype)
    with torch.autocast(device_type, enabled=False):
        out_BHTD = cache.attend(query, k_BGTD, value, mask_BS, attention)
    return out_BHTD.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
