"""Checks of the decode step as compiled for CUDA, in a process of its own and without a GPU. Prints a list of
JSON.

    python -m compile_tests.codegen.check lower    --backend flex --refresh --kernels --then lower --sample
    python -m compile_tests.codegen.check numbers  --backend dense --dtype float32 --plant

`lower` compiles the step as `Decoder` does, CUDA graphs and all, up to where they would be recorded: what was
generated, whether it may be recorded, what its kernels use. `numbers` runs what was generated in Triton's
interpreter, several steps in turn, and compares all state with the same steps run eagerly on the CPU.

Shape letters: B batch, G KV heads, N slots, D head dim.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

if sys.argv[1] == "numbers":
    os.environ["TRITON_INTERPRET"] = "1"
from compile_tests.codegen import pretend  # isort: skip

import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.codegen.generated import Function, Generated
from compile_tests.tiny import Step
from inertiakv import EvictionConfig, Sampling
from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.compiling.graphs import Graphs
from inertiakv.decoding.batch import BatchState
from inertiakv.models import Transformer, parse_config

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
}
SLOTS_8B = 6656  # a tenth of 64k tokens
TINY = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
SLOTS_TINY = 256
RULE = EvictionConfig(budget=180, sinks=1, recent=3)


def make_step(
    sizes: dict[str, int],
    batch: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    backend: str,
    window: int | None = None,
    tp: TensorParallel = SINGLE_PROCESS,
) -> Step:
    """Weights without values, and an empty cache. With `window` the second layer slides."""
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 2**17,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        **sizes,
    }
    if window is not None:
        raw |= {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    torch.set_default_dtype(dtype)  # fake parameters can't be cast or moved
    with device:
        model = Transformer(parse_config(raw), tp)
    torch.set_default_dtype(torch.float32)
    model.rotary.to(device)
    return Step.make(model, RULE, batch, slots, device, backend)


class _NotRun(Exception):
    """Compiled, and at the point where the GPU would be needed."""


@contextmanager
def recorded() -> Iterator[list[dict[str, Any]]]:
    """In place of recording CUDA graphs: what each partition asks to record, and why it could not be."""
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor.cudagraph_utils import check_for_mutation

    partitions: list[dict[str, Any]] = []

    def cudagraphify(
        model: Any,
        static_input_idxs: Any = (),
        *,
        placeholders: Any = (),
        mutated_input_idxs: Any = (),
        **_: Any,
    ) -> Callable[..., Any]:
        function = SimpleNamespace(
            mutated_input_idxs=mutated_input_idxs,
            static_input_idxs=static_input_idxs,
            placeholders=placeholders,
        )
        reason = check_for_mutation(function, [None] * len(placeholders), lambda tensor: False)  # type: ignore[arg-type]
        moving = set(mutated_input_idxs) - set(static_input_idxs)
        partitions.append({"mutated": len(mutated_input_idxs), "moving": len(moving), "reason": reason})

        def stop(*args: Any, **kwargs: Any) -> None:
            raise _NotRun

        return stop

    with patch.object(compile_fx, "cudagraphify", cudagraphify):
        yield partitions


@contextmanager
def written() -> Iterator[list[str]]:
    """The source of every module that the compiler writes for a whole graph."""
    sources: list[str] = []
    write = PyCodeCache.write

    def keep(source: str, *args: Any, **kwargs: Any) -> Any:
        if "def call(" in source:
            sources.append(source)
        return write(source, *args, **kwargs)

    with patch.object(PyCodeCache, "write", keep):
        yield sources


def first_of(size: int) -> TensorParallel:
    """The first rank of a group whose other processes are not there."""
    if size == 1:
        return SINGLE_PROCESS
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    return TensorParallel(0, size, dist.distributed_c10d._get_default_group().group_name)


def lower(options: argparse.Namespace) -> dict[str, Any]:
    tp = first_of(options.ranks)
    graphs = Graphs(enabled=True, device=CUDA)
    counters.clear()
    pretend.compiled.clear()
    sizes = {**LLAMA_8B, "num_hidden_layers": options.layers}
    sizes |= {"num_attention_heads": options.heads, "num_key_value_heads": options.kv_heads}
    with FakeTensorMode(), torch.no_grad(), fresh_cache(), recorded() as partitions, written() as sources:
        how = {"backend": options.backend, "tp": tp}
        step = make_step(sizes, options.batch, SLOTS_8B, torch.bfloat16, CUDA, **how)
        with (
            _planted_copy() if options.plant else nullcontext(),
            nullcontext() if options.kernels else patch.object(CachingAutotuner, "precompile"),
            suppress(_NotRun),
        ):
            step.run(graphs, refresh=options.refresh, greedy=not options.sample)
    assert len(sources) == 1, f"{len(sources)} modules"
    code = Generated(sources[0])
    kv_heads = step.cache.shape.kv_heads
    shape = (options.batch, kv_heads, SLOTS_8B, LLAMA_8B["head_dim"])
    return {
        "graphs": graphs.stats.compiled,
        "breaks": graphs.stats.breaks,
        "skips": counters["inductor"]["cudagraph_skips"],
        "recorded": partitions,
        "partitions": [_function(code, f, shape) for f in code.partitions],
        "regions": [_function(code, f, shape) for f in code.regions],
        "region_calls": sum(len(p.region_args(r.name)) for p in code.partitions for r in code.regions),
        "kernels": {name: _contents(code.kernel(name)) for name in code.kernels},
        "largest_buffer": code.largest_buffer(),
        "compiled": [*pretend.compiled],
    }


def _function(code: Generated, function: Function, cache_shape: tuple[int, ...]) -> dict[str, Any]:
    """What a function launches, in order, with the number of caches (K or V of a layer) that each kernel is
    given."""
    caches = code.cache_tensors(function, cache_shape)
    return {
        "launches": [
            {"kernel": launch.kernel, "caches": sum(name in caches for name in launch.args)}
            for launch in function.launches
        ],
        "library_calls": function.library_calls,
        "collectives": function.collectives,
        "host_lines": function.host_lines,
    }


def _contents(kernel: str) -> dict[str, int]:
    """How often a kernel's source has what kernels are told apart by."""
    return {name: kernel.count(name) for name in ("tl.sum(", ".exp(", ".sin(", "tl.dot(", "SPLIT_KV :")}


def _planted_copy() -> Any:
    """A step that copies to the host in its middle."""
    choose = BatchState.choose

    def choose_and_look(rows: BatchState, logits_BV: torch.Tensor, *, greedy: bool) -> None:
        choose(rows, logits_BV, greedy=greedy)
        rows.token_B.copy_(rows.token_B.cpu())

    return patch.object(BatchState, "choose", choose_and_look)


PLANTS: dict[str, tuple[str, str, str]] = {
    "evicts the highest utility": ("min_with_index", "min_with_index", "max_with_index"),
    "attention ignores the mask": (
        "tl.dot(",
        "tl.where(mask_mod_output, ",
        "tl.where(mask_mod_output | True, ",
    ),
    "scores by another base": ("tl.sum(", "libdevice.exp(", "libdevice.exp2("),
}
"""Mistakes that a compiler could make: in kernels that have the first text, the second becomes the third."""


def mistaken(source: str, plant: tuple[str, str, str] | None) -> str:
    if plant is None:
        return source
    where, before, after = plant
    kernels = source.split("async_compile.triton(")
    changed = [kernel.replace(before, after) if where in kernel else kernel for kernel in kernels]
    assert changed != kernels, f"nowhere {before} beside {where}"
    return "async_compile.triton(".join(changed)


def numbers(options: argparse.Namespace) -> dict[str, Any]:
    """By how much each kind of state differs after some steps, relative to its largest number."""
    import torch._inductor.compile_fx as compile_fx

    from compile_tests.codegen.interpret import OnCpu, mend

    pretend.H200.multi_processor_count = 16  # so few programs that interpreting them does not take minutes
    mend()
    dtype = getattr(torch, options.dtype)
    kind = {"sizes": TINY, "batch": 3, "slots": SLOTS_TINY, "dtype": dtype, "window": options.window}
    how = {"refresh": options.refresh, "greedy": not options.sample}
    runs = {"clean": options.steps} | dict.fromkeys(PLANTS if options.plant else (), 1)
    eager, real = (
        {name: begin(make_step(**kind, device=CPU, backend="dense")) for name in runs}  # type: ignore[arg-type]
        for _ in range(2)
    )
    for name, steps in runs.items():
        for _ in range(steps):
            eager[name].run(Graphs(enabled=False, device=CPU), **how)
    graphs = Graphs(enabled=True, device=CUDA)
    with (
        OnCpu() as on_cpu,
        FakeTensorMode(),
        torch.no_grad(),
        fresh_cache(),
        patch.object(compile_fx, "cudagraphify", lambda model, *args, **kwargs: model),
    ):
        fake = make_step(**kind, device=CUDA, backend=options.backend)  # type: ignore[arg-type]
        for name, steps in runs.items():
            on_cpu.edit = functools.partial(mistaken, plant=PLANTS.get(name))
            for theirs, ours in zip(fake.modules, real[name].modules, strict=True):
                on_cpu.stand_in(theirs, ours)
            for _ in range(steps):
                fake.run(graphs, **how)
    return {
        name: {part: _distance(value, state(eager[name])[part]) for part, value in state(real[name]).items()}
        for name in runs
    }


@torch.no_grad()
def begin(step: Step) -> Step:
    """Random weights, and rows in the middle of decoding: one with one of its two blocks of slots full, one
    with room left and a block empty, one that has ended. Slots in no order; those without a token hold NaN as
    K and 1e30 as V."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in step.model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, 1.0 if "embed" in name else 0.35, generator=generator)
    cache, rows = step.cache, step.batch
    (table,) = cache.retention
    table.budget_BX.fill_(RULE.budget or 0)
    for row, held in enumerate((180, 90, 180)):
        first, second = (torch.randperm(128, generator=generator) for _ in range(2))
        order = torch.cat([128 + second, first])
        used, free = order[:held], order[-1]
        table.position_BXN[row, 0, used] = 2 * torch.arange(held, dtype=torch.int32)
        table.utility_BXN[row, 0, used] = torch.rand(held, generator=generator)
        table.free_BX[row] = free
        rows.position_B[row] = 2 * held
        rows.token_B[row] = row
    rows.finished_B[2] = True
    rows.configure(Sampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, seed=5), [], 61)
    unused_B1N1 = (table.position_BXN < 0)[..., None]
    for layer in cache.layers:
        for buffer, poison in ((layer.k_BGND, torch.nan), (layer.v_BGND, 1e30)):
            buffer.normal_(generator=generator)
            buffer.masked_fill_(unused_B1N1, poison)
    return step


def state(step: Step) -> dict[str, torch.Tensor]:
    """All that a step changes; K and V where a slot holds a token."""
    (table,) = step.cache.retention
    held_BN = table.position_BXN[:, 0] >= 0
    kv = [
        buffer.transpose(1, 2)[held_BN]
        for layer in step.cache.layers
        for buffer in (layer.k_BGND, layer.v_BGND)
    ]
    rows = {name: getattr(step.batch, name) for name in ("history_BC", "token_B", "position_B")}
    return {
        "positions": table.position_BXN,
        "free slots": table.free_BX,
        "utilities": table.utility_BXN,
        "k and v": torch.stack(kv),
        **rows,
    }


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    distance = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(
        1e-30
    )
    return float(distance.nan_to_num(torch.inf))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=("lower", "numbers"))
    parser.add_argument("--backend", choices=("flex", "dense"), default="flex")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--plant", action="store_true", help="mistakes, which must show")
    parser.add_argument("--kernels", action="store_true", help="compile them, too")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=LLAMA_8B["num_attention_heads"])
    parser.add_argument("--kv-heads", type=int, default=LLAMA_8B["num_key_value_heads"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--window", type=int)
    parser.add_argument("--steps", type=int, default=1)
    found, argv = [], sys.argv[1:]
    while argv:
        end = argv.index("--then") if "--then" in argv else len(argv)
        options = parser.parse_args(argv[:end])
        found.append(lower(options) if options.check == "lower" else numbers(options))
        argv = argv[end + 1 :]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
