"""Tiny random models of every family, in the reference implementation too, and the simplest caches.

Shapes: B batch, T query tokens, H query heads, G KV heads, N slots, D head dim, L layers, V vocabulary.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from inertiakv.models import ModelConfig, Transformer, parse_config
from inertiakv.models.checkpoint import SINGLE, checkpoint_views
from inertiakv.models.config import FAMILIES as SUPPORTED

VOCAB = 97
ARCHITECTURES = {family.model_type: family.architecture for family in SUPPORTED}
FAMILIES = tuple(ARCHITECTURES)


def attend(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    query_BT: Tensor,
    key_BN: Tensor,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention by the one mask rule, written out."""
    group = q_BHTD.shape[1] // k_BGND.shape[1]
    k_BHND, v_BHND = k_BGND.repeat_interleave(group, 1), v_BGND.repeat_interleave(group, 1)
    age_BTN = query_BT[:, :, None] - key_BN[:, None, :]
    visible_BTN = (key_BN[:, None, :] >= 0) & (age_BTN >= 0)
    if window is not None:
        visible_BTN = visible_BTN & (age_BTN < window)
    score_BHTN = (q_BHTD @ k_BHND.mT * scale).masked_fill(~visible_BTN[:, None], -torch.inf)
    return torch.softmax(score_BHTN, dim=-1).nan_to_num(0.0) @ v_BHND


class _Direct:
    """Runs a model's layers as they are, and attends for them."""

    def run_layer(self, index: int, layer: nn.Module, x_BTE: Tensor, *args: Any) -> Tensor:
        return layer(x_BTE, *args, _Layer(self, index))


class _Layer:
    def __init__(self, cache: Any, index: int) -> None:
        self.cache, self.index = cache, index

    def attend(self, *args: Tensor, **options: Any) -> Tensor:
        return self.cache.attend(self.index, *args, **options)


class GrowingCache(_Direct):
    """Keeps everything. `positions` of the tokens of a forward pass are set before it."""

    def __init__(self) -> None:
        self.positions = torch.empty(0)
        self.layers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(
        self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        new = (k_BGTD, v_BGTD, self.positions)
        old = self.layers.get(layer)
        k, v, keys = (
            new
            if old is None
            else (
                torch.cat((old[0], k_BGTD), 2),
                torch.cat((old[1], v_BGTD), 2),
                torch.cat((old[2], self.positions), 1),
            )
        )
        self.layers[layer] = (k, v, keys)
        return attend(q_BHTD, k, v, self.positions, keys, window, scale)


class StaticCache(_Direct):
    """Fixed buffers, a decode step at a time; everything that changes is a tensor."""

    def __init__(self, config: ModelConfig, batch: int, slots: int, dtype: torch.dtype) -> None:
        shape = (config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)
        self.k_LBGND = torch.zeros(shape, dtype=dtype)
        self.v_LBGND = torch.zeros(shape, dtype=dtype)
        self.keys_BN = torch.full((batch, slots), -1)
        self.query_B = torch.zeros(batch, dtype=torch.long)

    def attend(
        self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        row_B = torch.arange(q_BHTD.shape[0])
        self.k_LBGND[layer, row_B, :, self.query_B] = k_BGTD[:, :, 0]
        self.v_LBGND[layer, row_B, :, self.query_B] = v_BGTD[:, :, 0]
        self.keys_BN[row_B, self.query_B] = self.query_B
        k, v = self.k_LBGND[layer], self.v_LBGND[layer]
        return attend(q_BHTD, k, v, self.query_B[:, None], self.keys_BN, window, scale)


def forward(model: Transformer, tokens_BT: Tensor, positions_BT: Tensor, cache: GrowingCache) -> Tensor:
    """Logits of all tokens, [B, T, V]."""
    cache.positions = positions_BT
    with torch.no_grad():
        return model.head(model(tokens_BT, positions_BT, cache))


def raw_config(family: str, heads: int = 4, kv_heads: int = 2, **options: Any) -> dict[str, Any]:
    """A tiny config.json in which no two sizes are equal; head_dim is not hidden size / heads."""
    raw: dict[str, Any] = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": VOCAB,
        "hidden_size": heads * 8,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        raw |= {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
    if family == "mistral":
        raw |= {"sliding_window": None}
    return {key: value for key, value in copy.deepcopy(raw | options).items() if value != "absent"}


def tiny_checkpoint(folder: Path, family: str = "llama", seed: int = 0, **options: Any) -> Path:
    """A folder with the config and weights of a random tiny model, made without the reference."""
    raw = raw_config(family, **options)
    model = Transformer(parse_config(raw))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        low, high = (0.5, 1.5) if "norm" in name else (-0.4, 0.4)
        parameter.uniform_(low, high, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: view.contiguous() for name, view in checkpoint_views(model)}, folder / SINGLE)
    return folder


def reference_config(family: str, heads: int = 4, kv_heads: int = 2, **options: Any) -> Any:
    """The config of `raw_config` as the reference implementation has it."""
    from transformers import AutoConfig

    raw = raw_config(family, heads, kv_heads, **options)
    return AutoConfig.for_model(raw.pop("model_type"), **raw)


def reference_model(config: Any, seed: int = 0) -> Any:
    """The reference implementation with every parameter random: it would start with biases 0 and norms 1."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.4 if "bias" in name else 0.25)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def random_tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Equal up to `tolerance`, relative to the scale of the expected logits."""
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f"relative error {error:.2e}"


def assert_parity(
    reference: Any, model: Transformer, prompt: int = 12, steps: int = 20, batch: int = 1
) -> None:
    """All logits of a prefill and of decode steps after it equal the reference's over the whole sequence."""
    tokens_BT = random_tokens(batch, prompt + steps)
    with torch.no_grad():
        expected_BTV = reference(tokens_BT, use_cache=False).logits
    positions_BT = torch.arange(prompt + steps).expand(batch, -1)
    cache = GrowingCache()
    for start, end in [(0, prompt), *((t, t + 1) for t in range(prompt, prompt + steps))]:
        logits_BTV = forward(model, tokens_BT[:, start:end], positions_BT[:, start:end], cache)
        assert_close(logits_BTV, expected_BTV[:, start:end])
