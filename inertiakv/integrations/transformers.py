"""`generate` of transformers with an evicting cache:

    cache = InertiaCache(model, EvictionConfig(compression=0.9, refresh=4))
    model.generate(**inputs, past_key_values=cache, max_new_tokens=256)

A model of transformers hands K and V to its cache, and what comes back to an attention function. The first
InertiaCache of a model names our function to its attention layers (`attachment.py`). K from an InertiaCache
says which one it is from, and all other K goes on to the function that the model had. So nothing of a request
is kept on the model, which several threads may use at once.

Shape letters: B batch, T tokens of a pass, S all tokens so far with their padding, H query heads, G KV heads,
D head dim, L tokens that a sliding layer still has.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..attention.forward_state import ForwardState
from ..attention.mask import visible
from ..cache.retention import EMPTY
from ..cache.slot_cache import SlotCache
from ..compiling.numerics import accumulation_dtype
from ..config import EvictionConfig
from ..decoding.forward import attention as attend_to
from ..scoring.learned import load_scorer
from .attachment import HandedOver, attach
from .checks import NAME, check_model, check_rule, of_evicted_layers, text_config
from .layerwise import Attention, LayerwiseConversation

_uncompiled = torch.compiler.disable(reason="InertiaCache runs as it is: compile without fullgraph=True")


def _refused(why: str) -> Any:
    """A method of other caches that this one cannot have."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(why)

    return refuse


class InertiaCache(Cache):
    """Keeps no more of each row's KV cache than its budget. One model's, and one conversation's: a further
    `generate` with it goes on with what it has kept, `reset` forgets.

    * `model`: a decoder of transformers whose attention goes through `AttentionInterface`. Layers with a
      sliding window are left alone where others have none.
    * `eviction`: the rule. Budgets, positions and evictions are those of `Decoder`.

    Prompts of different lengths are padded on the left. `generate` does not say when a row has ended: it goes
    on with its padding until the others have ended, and where the next turn's attention mask leaves that out,
    it is forgotten. Nor does it say where a prompt ends: before the first token that comes alone. So with
    `prefill_chunk_size` a last chunk of one token is the first decode step, and each chunk of a further turn
    is a turn. After an answer of one token, which takes no step, the prompt goes on: budgets are those of all
    that comes until the first step.

    In a compiled model (`model.compile()`) it runs as it is, between graphs of what else there is.

    Raises ValueError for a model or a rule that cannot work so, and later for what cannot be right: beams,
    assisted decoding, training, attention weights as an output, masks that are not causal.
    """

    def __init__(self, model: Any, eviction: EvictionConfig = EvictionConfig()) -> None:  # noqa: B008 (immutable)
        self._config = text_config(model)
        check_model(model, self._config)
        windows = [getattr(layer, "sliding_window", None) for layer in self._own_layers()]
        self._windows = windows
        # Where all layers slide, all are evicted, under their windows.
        self._evicted = [i for i, w in enumerate(windows) if w is None] or list(range(len(windows)))
        self.eviction = of_evicted_layers(check_rule(eviction), self._evicted, windows)
        attach(model)
        super().__init__(layers=[])
        self.reset()

    # What is asked of it by users.

    @property
    def slots(self) -> SlotCache | None:
        """K, V and retention sets of the layers that are evicted, None before the first pass."""
        return None if self._conversation is None else self._conversation.cache

    @property
    def sequence_tokens(self) -> list[int]:
        """Tokens of each row that have gone through the cache, evicted or not."""
        return [] if self._conversation is None else self._conversation.batch.position_B.tolist()

    @property
    def kept_tokens(self) -> list[float]:
        """Tokens that each row holds, in the mean over its retention sets."""
        return [] if self.slots is None else self.slots.kept_tokens

    @property
    def allocated_bytes(self) -> int:
        """Bytes that K and V hold now, as allocated, those of layers left alone among them."""
        alone = [(layer.keys, layer.values) for layer in self.layers if isinstance(layer, DynamicLayer)]
        own = sum(t.untyped_storage().nbytes() for pair in alone for t in pair if t is not None)
        return own + (0 if self.slots is None else self.slots.allocated_bytes)

    def reset(self) -> None:
        """Forget everything."""
        own = self._own_layers()
        self.layers: list[Any] = [_Layer(self) if i in self._evicted else own[i] for i in range(len(own))]
        self._conversation: LayerwiseConversation | None = None
        self._position_BS: Tensor | None = None  # of all tokens so far, `EMPTY` for padding
        self._past = 0  # tokens of a row in former passes
        self._layer = 0  # the one that attends next
        self._handed_over = False  # its K and V have come

    # What is asked of it by a model.

    @_uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands K and V through. Everything else happens in the attention function."""
        if self._handed_over:
            self.broken_off()
            raise ValueError(
                f"layer {self._layer} attends without {NAME!r}: the model does not use AttentionInterface, "
                "or is not the one that this cache was made for"
            )
        if layer_idx != self._layer:
            raise ValueError(
                f"layer {layer_idx} comes where layer {self._layer} should: a forward pass was broken off. "
                "Call the cache's reset()"
            )
        self._handed_over = True
        return HandedOver.by(self, key_states), value_states

    @_uncompiled
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._past

    @_uncompiled
    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self._past + new, 0

    reorder_cache = _refused("beams cannot share an InertiaCache: generate with num_beams=1")
    crop = _refused("an InertiaCache cannot go back, as assisted decoding does: what it evicted is gone")
    activate_past_recording = crop
    batch_repeat_interleave = _refused("rows of an InertiaCache cannot be repeated")
    batch_select_indices = _refused("rows of an InertiaCache cannot be selected")

    def __deepcopy__(self, memo: dict[int, Any]) -> InertiaCache:
        """Another cache of the same model, with what this one has kept."""
        memo[id(self._config)] = self._config
        other = memo[id(self)] = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(other, name, copy.deepcopy(value, memo))
        return other

    def __reduce__(self) -> NoReturn:
        raise TypeError("an InertiaCache cannot be pickled: it is one model's, of this process")

    # The pass itself.

    def is_of(self, config: Any) -> bool:
        """Whether it was made for the model with this config."""
        return config is self._config

    def broken_off(self) -> None:
        """K and V that have come are not attended to."""
        self._handed_over = False

    def attend(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_BS: Tensor | None, attention: Attention
    ) -> Tensor:
        """What the queries of the next layer see, [B, H, T, D]."""
        layer, self._handed_over = self._layer, False
        if attention.window != self._windows[layer]:
            raise ValueError(
                f"layer {layer} has a window of {attention.window}, by its config {self._windows[layer]}"
            )
        length = q_BHTD.shape[2]
        if layer == 0:
            self._place(len(q_BHTD), length, mask_BS, q_BHTD.device)
        try:
            assert self._position_BS is not None
            if layer not in self._evicted:
                out_BHTD = self._attend_alone(q_BHTD, k_BGTD, v_BGTD, attention)
            else:
                if layer == self._evicted[0]:
                    self._begin(k_BGTD, self._position_BS[:, -length:] > EMPTY)
                assert self._conversation is not None
                self._conversation.check(layer, k_BGTD, v_BGTD)
                out_BHTD = self._conversation.attend(
                    self._evicted.index(layer), q_BHTD, k_BGTD, v_BGTD, attention
                )
                if layer == self._evicted[-1]:
                    self._conversation.end()
            self._layer += 1
            if self._layer == len(self.layers):
                self._layer, self._past = 0, self._past + length
            return out_BHTD
        except BaseException:
            self.reset()  # it is between two states
            raise

    def _place(self, batch: int, length: int, mask_BS: Tensor | None, device: torch.device) -> None:
        """Number the new tokens of each row, without their padding."""
        old_BS, past = self._position_BS, self._past
        if old_BS is None:
            old_BS = torch.empty(batch, 0, dtype=torch.int64, device=device)
        if mask_BS is None:
            mask_BS = torch.ones(batch, past + length, dtype=torch.bool, device=device)
        if batch != len(old_BS):
            raise ValueError(f"{batch} rows for a cache of {len(old_BS)}")
        if mask_BS.shape != (batch, past + length):
            raise ValueError(
                f"an attention mask of {list(mask_BS.shape)} for {batch} rows of {past + length} tokens"
            )
        real_BT = mask_BS[:, past:]
        if length > 1:
            if bool((real_BT.any(-1) & ~real_BT[:, -1]).any()):
                raise ValueError("padding after a row's last token: pad prompts on the left")
            if past:
                old_BS = self._follow(old_BS, mask_BS[:, :past])
        start_B1 = torch.nn.functional.pad(old_BS, (1, 0), value=EMPTY).amax(-1, keepdim=True) + 1
        new_BT = torch.where(real_BT, start_B1 + real_BT.cumsum(-1) - 1, EMPTY)
        self._position_BS = torch.cat((old_BS, new_BT), dim=1)

    def _follow(self, position_BS: Tensor, mask_BS: Tensor) -> Tensor:
        """The positions of former tokens where a further turn leaves out what rows took in after they had
        ended."""
        length_B1 = mask_BS.sum(-1, keepdim=True)
        kept_BS = torch.where(position_BS < length_B1, position_BS, EMPTY)
        if not torch.equal(kept_BS > EMPTY, mask_BS):
            raise ValueError(
                "the attention mask is not that of the former turns: of their tokens, only a row's last ones "
                "can be left out"
            )
        if not torch.equal(kept_BS, position_BS):
            assert self._conversation is not None
            self._conversation.forget_from(length_B1[:, 0])
        return kept_BS

    def _begin(self, k_BGTD: Tensor, real_BT: Tensor) -> None:
        if self._conversation is None:
            windows, learned = [self._windows[i] for i in self._evicted], None
            if self.eviction.scorer_file is not None:
                heads = self._config.num_attention_heads
                sizes = SimpleNamespace(
                    num_heads=heads, num_kv_heads=k_BGTD.shape[1], head_dim=k_BGTD.shape[3]
                )
                where: dict[str, Any] = {"device": k_BGTD.device, "dtype": accumulation_dtype(k_BGTD.dtype)}
                learned = load_scorer(self.eviction.scorer_file, sizes, **where)
            self._conversation = LayerwiseConversation(self.eviction, windows, real_BT, k_BGTD, learned)
        self._conversation.begin(real_BT)

    def _attend_alone(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, attention: Attention) -> Tensor:
        """Of a sliding layer, over what it still has and the new tokens."""
        assert self._position_BS is not None
        k_BGLD, v_BGLD = self.layers[self._layer].update(k_BGTD, v_BGTD)
        window, scale, softmax = attention
        length, held = q_BHTD.shape[2], k_BGLD.shape[2]
        # A window counts padding, too, and what the layer has still is counted so.
        column_S = torch.arange(self._position_BS.shape[1], device=q_BHTD.device)
        column_BS = torch.where(self._position_BS > EMPTY, column_S, EMPTY)
        query_BT, position_BXL = column_BS[:, -length:], column_BS[:, None, -held:]
        masks = (visible(position_BXL, query_BT, window),) if length == 1 else ()
        state = ForwardState(query_BT, None, "dense", (window,), slots_used=held)
        state = state._replace(position_BXN=position_BXL, visible_BXTN=masks)
        return attend_to(state, q_BHTD, k_BGLD, v_BGLD, window, scale, softmax, weighs=False)[0]

    def _own_layers(self) -> list[Any]:
        """What transformers would take: its sliding layers are used as they are."""
        return DynamicCache(config=self._config).layers


class _Layer(CacheLayerMixin):
    """A layer that is evicted, as far as transformers looks into it."""

    is_sliding = False

    def __init__(self, cache: InertiaCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, *args: Any) -> None:
        pass

    update = _refused("a layer of an InertiaCache takes nothing by itself")

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions
