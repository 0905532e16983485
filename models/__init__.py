"""Llama, Qwen2.5, Qwen3, Qwen3-MoE and Mistral for decoding. They leave attention to `inertiakv`'s cache."""

from .chat import Chat
from .checkpoint import load_checkpoint
from .config import ModelConfig, parse_config
from .family import MoEConfig
from .hub import load_model
from .rope import RopeConfig
from .transformer import Transformer

__all__ = [
    "Chat",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "Transformer",
    "load_checkpoint",
    "load_model",
    "parse_config",
]
