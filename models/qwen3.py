"""Qwen3: an RMSNorm on every query and key head before RoPE; no biases; sliding windows as in Qwen2."""

from .family import Family
from .qwen2 import windows

FAMILY = Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, default_head_dim=128, windows=windows)
