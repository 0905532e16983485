"""Compiled decoding of large language models that reads and keeps a tenth of the KV cache."""

from .config import EvictionConfig
from .decoder import Decoder
from .policies import POLICIES, policy
from .requests.results import Generation, Stats
from .requests.sampling import Sampling
from .requests.text import StopStrings, TextStream

__all__ = [
    "POLICIES",
    "Decoder",
    "EvictionConfig",
    "Generation",
    "Sampling",
    "Stats",
    "StopStrings",
    "TextStream",
    "policy",
]
__version__ = "0.1.0"
