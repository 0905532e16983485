"""Llama 2, 3.1, 3.2, 3.3 and models of their shape, SmolLM2 among them: the plain form, nothing added."""

from .family import NO_ATTENTION_BIAS, NO_WINDOW, Family

LLAMA = Family("llama", "LlamaForCausalLM", accepts={**NO_ATTENTION_BIAS, **NO_WINDOW})
