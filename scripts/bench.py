"""Measure decoding speed: policies of inertiakv and other implementations side by side, in one process.

The contenders take turns, a block of decode steps each, so that whatever else the machine does affects all
alike. Every time is compared with the limit: the bytes that a step must read (weights once, kept K and V
once) over this machine's memory bandwidth.

Processes that torchrun starts share the model. A step's time is that of the slowest one; bytes and bandwidth
are those of rank 0, measured while the others measure theirs.

Examples:
  python scripts/bench.py                              SmolLM2-135M: the main policies, and transformers
  python scripts/bench.py --context 2048,8192 --batch 1,8 --dtype bfloat16,float32
  python scripts/bench.py --policies full,lazy4 --against none --profile --out lazy.json
  python scripts/bench.py --shape llama-3.2-1b --layers 4 --context 65536 --skip-prefill
  python scripts/bench.py --shape llama-3.1-8b --context 65536 --batch 1,16 --skip-prefill --compile-times
  torchrun --nproc-per-node 4 scripts/bench.py --shape llama-3.3-70b --context 65536 --skip-prefill

Tables go to stdout, or one object with --json, progress to stderr. The exit code is 0, or 2 if the command
line or a file is wrong, or nothing could be measured.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, installed or not

from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.models import Transformer, load_model
from inertiakv.models.files import read_json_object
from inertiakv.models.hub import find_folder
from inertiakv.models.parallel import init_tensor_parallel
from inertiakv.scripts.benchmarking import breakdown, machine, measure, report, results
from inertiakv.scripts.benchmarking.measure import Case, Contender
from inertiakv.scripts.benchmarking.options import Options, parse
from inertiakv.scripts.benchmarking.ours import Ours, refresh_period
from inertiakv.scripts.benchmarking.rivals import rival
from inertiakv.scripts.benchmarking.shapes import random_model, shape, without_position_limit
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.program import say

Entries = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: run(parse(argv, __doc__)))


def run(options: Options) -> None:
    """Measure, write and print; with several processes rank 0 alone prints and writes.

    The file is written after every setting, so that an interrupted run leaves what it has measured."""
    with init_tensor_parallel(str(options.on)) as (tp, device), program.silence(tp.rank > 0):
        options = replace(options, device=str(device), out=options.out if tp.rank == 0 else None)
        others = [(results.read(file), file.name) for file in options.merge]
        result: dict[str, Any] = {}
        with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
            for result in settings(options, tp):
                for other, name in others:
                    result["contenders"] += results.merge(result, other, name)
                if options.out:
                    results.write(options.out, result)
        if options.out and options.profile:
            report.draw(result["contenders"], options.out.with_suffix(".png"))
        print(json.dumps(result) if options.json else report.text(result))


def settings(options: Options, tp: TensorParallel) -> Iterator[dict[str, Any]]:
    """The results so far as a JSON object, after every setting in which something could be measured."""
    compiled = compile_times(options) if options.compile_times else None
    contenders: Entries = []
    skipped: Entries = []
    for dtype in options.dtypes:
        model, raw = load(options, dtype, tp)
        about = {
            "name": options.name,
            "source": model.source,
            "layers": model.config.num_layers,
            "quantize": options.quantize,
            "ranks": tp.size,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        for context, batch in itertools.product(options.context, options.batch):
            measured, left_out = run_case(new_case(options, model, raw, context, batch), options)
            contenders, skipped = contenders + measured, skipped + left_out
            release(options)
            if not contenders:
                continue
            read = statistics.median(contender["read_gb_per_s"] for contender in contenders)
            measured_by = f"the fastest of float32 {', '.join(machine.READS)}"
            yield {
                "machine": machine.describe(options.on),
                "versions": machine.versions(),
                "command": options.command,
                "model": about,
                "read_gb_per_s": round(read, 2),
                "read_by": measured_by if options.read_gb_per_s is None else "given",
                "compile_seconds": compiled,
                "reference": options.reference,
                "contenders": [*contenders],
                "skipped": skipped,
            }
        del model
        release(options)
    if not contenders:
        raise ValueError(f"nothing could be measured: {report.skipped_line(skipped[0])}")


def release(options: Options) -> None:
    """Free what a setting has used: caches, and graphs, which refer to the model."""
    if options.compile:
        torch.compiler.reset()
    gc.collect()
    if options.on.type == "cuda":
        torch.cuda.empty_cache()


def load(
    options: Options, dtype: str | torch.dtype, tp: TensorParallel
) -> tuple[Transformer, dict[str, Any]]:
    """The model, or this rank's part of it, and its config.json."""
    say(f"loading {options.name} ...")
    if options.shape is not None:
        assert isinstance(dtype, torch.dtype)
        raw = shape(options.shape, options.layers)
        return random_model(raw, dtype, options.on, options.quantize, tp), raw
    folder, _ = find_folder(options.name)
    raw = read_json_object(folder / "config.json")
    model, _ = load_model(options.name, dtype=dtype, device=options.on, quantize=options.quantize, tp=tp)
    return model, raw


def new_case(options: Options, model: Transformer, raw: dict[str, Any], context: int, batch: int) -> Case:
    # One turn more than is measured, and two tokens more per turn: `generate` begins with one of its own.
    new_tokens = measure.warm_up_steps(options.period) + (options.blocks + 1) * (options.block + 2)
    if options.profile:
        new_tokens += breakdown.steps_needed(options.period)
    without_position_limit(model, context + new_tokens)
    same = {name: getattr(options, name) for name in ("kept", "skip_prefill", "compile", "attention")}
    return Case(model, raw, context, batch, new_tokens, **same)


def run_case(case: Case, options: Options) -> tuple[Entries, Entries]:
    """One setting: the entries of all contenders, and of those that could not be measured."""
    dtype = str(case.model.dtype).removeprefix("torch.")
    setting = {"dtype": dtype, "batch": case.batch, "context": case.context}
    say(f"--- {dtype}, {case.context:,} tokens of context, batch {case.batch}")
    contenders: list[Contender] = []
    skipped: Entries = []
    # Rivals come first: once transformers is used, what it registers with the compiler makes earlier graphs
    # stale. Each is made when its turn comes, since its cache is large.
    for names in (options.rivals, options.policies):
        own = case
        for name in names:
            try:
                ours = name in options.policies
                contender = Ours(name, own, options.rules[name]) if ours else rival(name, own)
                measure.begin(contender)
            except Exception as error:  # the others are still worth measuring
                if case.model.tp.size > 1 and not isinstance(error, (ValueError, MemoryError)):
                    raise  # other ranks may not have failed, and would wait
                reason = " ".join(str(error).split()) or type(error).__name__
                skipped.append({"name": name, **setting, "reason": reason})
                say(f"left out: {report.skipped_line(skipped[-1])}")
            else:
                contenders.append(contender)
                own = replace(case, skip_prefill=True)  # one prefill of each kind is enough
    if not contenders:
        return [], skipped
    given = options.read_gb_per_s
    read = (lambda: machine.measure_read(options.on)) if given is None else (lambda: 1e9 * given)
    speed = measure.run_rounds(contenders, options.blocks, options.block, read)
    reference = next((c for c in contenders if c.name == options.reference), None)
    entries = {contender: measure.entry(contender, setting, reference, speed) for contender in contenders}
    scoring = [contender for contender in contenders if isinstance(contender, Ours)]
    if options.profile and scoring:
        most = max(scoring, key=lambda contender: (contender.eviction is not None, contender.refresh_share))
        entries[most]["profile"] = breakdown.of_step(most)
    return list(entries.values()), skipped


def compile_times(options: Options) -> dict[str, float]:
    """Seconds of compiling with an empty cache on disk, and with one that has the graphs.

    Of the policy with the longest period, which has both kinds of steps, in the first setting. Each is
    measured in a new process."""
    name = max(options.policies, key=lambda name: refresh_period(options.rules[name]))
    say(f"compiling {name}, cold and warm ...")
    first = {key: getattr(options, key)[:1] for key in ("context", "batch", "dtype")}
    alone = replace(options, **first, policies=[name], against=[], skip_prefill=True)
    alone = replace(alone, blocks=2, read_gb_per_s=1.0, compile_times=False, profile=False)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        os.environ.pop("TRITON_CACHE_DIR", None)
        return {which: round(in_new_process(alone), 2) for which in ("cold", "warm")}


def in_new_process(options: Options) -> float:
    """`compile_seconds` in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(compile_seconds, options).result()
        except BrokenProcessPool as error:
            raise ValueError("measuring compile times failed: the process ended early") from error


def compile_seconds(options: Options) -> float:
    """How much longer the first steps of the only contender take than later ones."""
    with contextlib.redirect_stdout(sys.stderr):
        (result,) = settings(options, SINGLE_PROCESS)
    return float(result["contenders"][0]["compile_seconds"])


if __name__ == "__main__":
    sys.exit(main())
