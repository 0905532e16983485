"""The parts of `scripts/bench.py`. They need torch, transformers, safetensors, einops and numpy alone."""

KVPRESS_PACKAGES = "torch==2.13.0 kvpress==0.5.5 transformers==5.2.0 einops"
"""kvpress wants an older transformers than the rest, so an environment of its own with these."""
