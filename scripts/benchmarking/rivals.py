"""Other implementations of decoding, as contenders that share the model's weights in memory."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inertiakv import EvictionConfig
from inertiakv.cache import memory
from inertiakv.models import Transformer
from inertiakv.models.checkpoint import checkpoint_views
from inertiakv.models.moe import Experts

from .machine import synchronize
from .measure import Case, Contender
from .traffic import kv_bytes

EVICTING = ("transformers-inertiakv", "kvpress", "kvpress4")
"""Rivals that keep to a budget."""
RIVALS = ("transformers", "transformers-static", *EVICTING)
KVPRESS_PACKAGES = "torch==2.13.0 kvpress==0.5.5 transformers==5.2.0 einops"
KVPRESS_HINT = (
    "kvpress is not installed here; it needs an older transformers, so an environment of its own: "
    f"`python -m venv .kvpress && .kvpress/bin/pip install {KVPRESS_PACKAGES}`, then "
    "`.kvpress/bin/python scripts/bench.py --policies none --against kvpress ... --out kvpress.json`, "
    "then `--merge kvpress.json` here"
)


def check_rival(name: str) -> None:
    """Raise ValueError for a rival that cannot run here."""
    if name not in RIVALS:
        raise ValueError(f"unknown rival {name!r}; choose from {', '.join(RIVALS)}")
    if name.startswith("kvpress"):
        try:
            import kvpress  # noqa: F401
        except ImportError as error:
            hint = KVPRESS_HINT if error.name == "kvpress" else f"kvpress cannot be imported: {error}"
            raise ValueError(hint) from error


def rival(name: str, case: Case) -> Rival:
    """The contender of one of the names in RIVALS."""
    return KVPress(name, case) if name.startswith("kvpress") else Transformers(name, case)


class Rival(Contender):
    """What all have in common: the model in transformers, and one of its caches, `kv`."""

    kv: Any

    def _load(self) -> None:
        """Raises MemoryError if the largest cache does not fit."""
        slots = [max(self.case.lengths) + self.case.new_tokens] * self.case.batch
        need = kv_bytes(self.case.model.config, slots, self.case.model.dtype)
        memory.require({f"{self.name} cache": need}, self.device)
        self.hf = transformers_model(self.case)

    def _fill(self) -> None:
        """Put random K and V into the cache in place of the prompt's."""
        config, dtype = self.case.model.config, self.case.model.dtype
        size = (self.case.batch, config.num_kv_heads, max(self.case.lengths), config.head_dim)
        k, v = (torch.randn(size, device=self.device).to(dtype) for _ in range(2))
        for layer in range(config.num_layers):
            self.kv.update(k.clone(), v.clone(), layer)

    def cache_bytes(self) -> int:
        tensors = [tensor for layer in self.kv.layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class Transformers(Rival):
    """`generate` of transformers, greedy, with SDPA and a dynamic cache, with a static cache, compiled, or
    with an `InertiaCache` under the paper's rule.

    A step is the time between two calls of a logits processor. Each block of steps is one call of `generate`
    that continues with the cache of the call before; what a call takes to begin does not count. On CPUs
    compiled steps use plain attention: the compiler makes it about twice as fast as SDPA with the mask that
    a static cache needs.
    """

    def __init__(self, name: str, case: Case) -> None:
        super().__init__(name, case)
        self.evicts = name in EVICTING
        self.compiles = name == "transformers-static" and case.compile

    def start(self) -> None:
        self._load()
        self.kv = self._new_cache()
        longest = max(self.case.lengths)
        self.ids = torch.zeros(self.case.batch, longest, dtype=torch.int64, device=self.device)
        self.mask = torch.zeros_like(self.ids)
        for row, tokens in enumerate(self.case.prompts()):
            self.ids[row, longest - len(tokens) :] = torch.tensor(tokens, device=self.device)
            self.mask[row, longest - len(tokens) :] = 1
        if self.case.skip_prefill and not self.evicts:
            self.how = "synthetic prompt"
            self._fill()
            self._append(self.ids[:, -1:])
        else:  # eviction decides by the prompt, which therefore is always read
            synchronize(self.device)
            begin = time.perf_counter()
            self.first_token_ms = 1000 * (self._generate(1)[0] - begin)
        if self.compiles and self.device.type == "cpu":
            self.hf.set_attn_implementation("eager")

    def steps(self, count: int) -> list[float]:
        stamps = self._generate(count + 1)
        if self.device.type == "cuda":
            return [1000 * (stamps[count] - stamps[0]) / count]
        return [1000 * (stamps[i + 1] - stamps[i]) for i in range(count)]

    def kept(self) -> list[int]:
        if self.evicts:
            return [round(kept) for kept in self.kv.kept_tokens]
        return (self.mask.sum(-1) - 1).tolist()  # the last token chosen is not in the cache yet

    def cache_bytes(self) -> int:
        return self.kv.allocated_bytes if self.evicts else super().cache_bytes()

    def extra(self) -> dict[str, Any]:
        return {"attention": self.hf.config._attn_implementation}

    def _new_cache(self) -> Any:
        from transformers import DynamicCache, StaticCache

        if self.evicts:
            from inertiakv.integrations.transformers import InertiaCache  # not with kvpress's transformers

            return InertiaCache(self.hf, EvictionConfig(budget=self.case.budget))
        if self.name == "transformers-static":
            slots = max(self.case.lengths) + self.case.new_tokens
            return StaticCache(config=self.hf.config, max_cache_len=slots)
        return DynamicCache(config=self.hf.config)

    def _append(self, ids: Tensor) -> None:
        self.ids = torch.cat([self.ids, ids], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], dim=1)

    @torch.no_grad()
    def _generate(self, new: int) -> list[float]:
        """Generate `new` tokens; the times at which their logits were there."""
        stamps: list[float] = []

        def stamp(ids: Tensor, scores: Tensor) -> Tensor:
            if len(stamps) in (0, new - 1):  # waiting in between would slow down a GPU
                synchronize(self.device)
            stamps.append(time.perf_counter())
            return scores

        # The cache argument's name has changed between versions of transformers.
        arguments = inspect.signature(self.hf.prepare_inputs_for_generation).parameters
        out = self.hf.generate(
            self.ids,
            attention_mask=self.mask,
            max_new_tokens=new,
            do_sample=False,
            logits_processor=[stamp],
            **{"cache" if "cache" in arguments else "past_key_values": self.kv},
            **self._compile_options(new),
        )
        self._append(out[:, self.ids.shape[1] :])
        return stamps

    def _compile_options(self, new: int) -> dict[str, Any]:
        # The first token comes from the prefill, which generate does not compile.
        if not self.compiles or new == 1:
            return {"disable_compile": True}
        from transformers import CompileConfig

        config = CompileConfig() if self.device.type == "cuda" else CompileConfig(mode="default")
        config._compile_all_devices = True  # type: ignore[assignment]  # by default on CUDA alone
        return {"compile_config": config}


class KVPress(Rival):
    """kvpress: TOVA's scores at every decode step, or at every fourth, in a loop like its own pipeline's."""

    def __init__(self, name: str, case: Case) -> None:
        super().__init__(name, case)
        self.period = 4 if name == "kvpress4" else 1

    def start(self) -> None:
        if self.case.batch > 1:
            raise ValueError("its loop decodes one prompt at a time")
        from kvpress import DecodingPress, TOVAPress
        from transformers import DynamicCache

        self._load()
        press = DecodingPress(
            TOVAPress(),
            compression_interval=self.period,
            target_size=self.case.budget,
            hidden_states_buffer_size=1,
        )
        self.kv = DynamicCache(config=self.hf.config)
        self._open = contextlib.ExitStack()
        self._open.enter_context(press(self.hf))
        self.position = self.case.context
        synchronize(self.device)
        begin = time.perf_counter()
        if self.case.skip_prefill:
            self.how = "synthetic prompt"
            self._fill()
            self.token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        else:
            self.token = self._feed(torch.tensor(self.case.prompts(), device=self.device), 0)
            self.first_token_ms = 1000 * (time.perf_counter() - begin)
        self.first_step_ms = self.steps(self.period)[-1]

    def steps(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.token = self._feed(self.token, self.position)
            self.token.item()  # its pipeline checks for the end at every step
            self.position += 1
            times.append(1000 * (time.perf_counter() - begin))
        return times

    def kept(self) -> list[int]:
        return [self.kv.layers[0].keys.shape[2]]

    @torch.no_grad()
    def _feed(self, ids: Tensor, position: int) -> Tensor:
        positions = torch.arange(position, position + ids.shape[1], device=self.device)[None]
        out = self.hf(
            input_ids=ids, past_key_values=self.kv, position_ids=positions, logits_to_keep=1, use_cache=True
        )
        return out.logits[:, -1].argmax(-1, keepdim=True)


def transformers_model(case: Case) -> Any:
    """The model in transformers. Its weights are the same tensors, not a copy."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    model, no_ids = case.model, dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(**case.raw | no_ids | {"use_cache": True})
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    hf.requires_grad_(False)  # before loading: it would set the flag of the shared weights
    hf.load_state_dict(dict(_weights(model)), strict=False, assign=True)
    hf.tie_weights()
    hf.model.rotary_emb = type(hf.model.rotary_emb)(config).to(model.device)
    missing = [name for name, tensor in [*hf.named_parameters(), *hf.named_buffers()] if tensor.is_meta]
    assert not missing, f"no values for {missing}"
    hf.generation_config = GenerationConfig(pad_token_id=0)
    return hf.eval()


def _weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Our tensors by transformers' names, which stacks experts as we do."""
    for name, tensor in checkpoint_views(model):
        if ".experts." not in name:
            yield name, tensor
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            yield f"model.{path}.gate_up_proj", module.gate_up_XOI
            yield f"model.{path}.down_proj", module.down_XOI
