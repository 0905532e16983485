"""Llama, Qwen2.5, Qwen3, Qwen3-MoE and Mistral, for decoding only, behind one small cache protocol."""

from .checkpoint import load_checkpoint
from .config import ModelConfig, MoEConfig
from .hub import load_model
from .parse import parse_config
from .rope import RopeConfig
from .transformer import Transformer

__all__ = [
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "Transformer",
    "load_checkpoint",
    "load_model",
    "parse_config",
]
