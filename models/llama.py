"""Llama 2, 3.1, 3.2, 3.3 and models of the same architecture, such as SmolLM2: every default."""

from .family import Family

FAMILY = Family("llama", "LlamaForCausalLM", accepts={"sliding_window": ()})
