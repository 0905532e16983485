"""The parts of `scripts/bench.py`. They need torch, transformers, safetensors, einops and numpy alone."""
