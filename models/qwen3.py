"""Qwen3: an RMSNorm on every query and key head before RoPE, no biases."""

from .family import NO_ATTENTION_BIAS, Family
from .qwen2 import upper_windows

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    accepts=NO_ATTENTION_BIAS,
    qk_norm=True,
    default_head_dim=128,
    windows=upper_windows,
)
