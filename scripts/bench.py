"""Measure decoding speed: policies of inertiakv and other implementations side by side, in one process.

The contenders take turns, a block of decode steps each, so that whatever the machine does meanwhile hits all
alike. Every time is set against the limit: the bytes that a step must read (weights once, kept K and V once)
over the bandwidth that this machine reads with.

Processes that torchrun starts hold the model together. A step's time is the slowest one's; bytes, and the
bandwidth, are those of rank 0, measured while the others measure theirs.

Examples:
  python scripts/bench.py                              SmolLM2-135M: the main policies, and transformers
  python scripts/bench.py --context 2048,8192 --batch 1,8 --dtype bfloat16,float32
  python scripts/bench.py --policies full,lazy4 --against none --profile --out lazy.json
  python scripts/bench.py --shape llama-3.2-1b --layers 4 --context 65536 --skip-prefill
  python scripts/bench.py --shape llama-3.1-8b --context 65536 --batch 1,16 --skip-prefill --compile-times
  torchrun --nproc-per-node 4 scripts/bench.py --shape llama-3.3-70b --context 65536 --skip-prefill

Tables go to stdout, or with --json one object, progress to stderr. The exit code is 0, or 2 where the
command line or a file is wrong, or nothing could be measured.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv.compiling.collectives import TensorParallel
from inertiakv.models import Transformer, load_model
from inertiakv.models.hub import find_folder
from inertiakv.models.parallel import joined
from inertiakv.scripts.benchmarking import breakdown, first_step, machine, report, results, scaling, traffic
from inertiakv.scripts.benchmarking.compiling import compile_seconds
from inertiakv.scripts.benchmarking.contender import Case, Contender
from inertiakv.scripts.benchmarking.measure import Measured, begin, ratio, run_rounds, spread, warm_up_steps
from inertiakv.scripts.benchmarking.options import Options, parse
from inertiakv.scripts.benchmarking.ours import Ours
from inertiakv.scripts.benchmarking.rivals import Rival, rival
from inertiakv.scripts.benchmarking.shapes import random_model, shape, without_position_limit
from inertiakv.scripts.cli import program

PROFILE_ROUNDS, PROFILE_STEPS = 24, 4  # the steps are made whole periods


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: run(parse(sys.argv[1:] if argv is None else argv, __doc__)))


def run(options: Options) -> None:
    """Measure, alone or with the other processes of torchrun, of which one speaks and writes."""
    with joined(str(options.device)) as (tp, device), program.silence(tp.rank > 0):
        options = replace(options, device=device, out=options.out if tp.rank == 0 else None)
        bench(options, tp)


def bench(options: Options, tp: TensorParallel) -> None:
    """Measure, write, print. The file is written after every setting, so that what is broken off leaves what
    it has measured."""
    others = [(results.read(file), file.name) for file in options.merge]
    result: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        for result in measure(options, tp):
            for other, name in others:
                result["contenders"] += results.merge(result, other, name)
            if options.out:
                results.write(options.out, result)
    if options.out and options.profile:
        breakdown.draw(result["contenders"], options.out.with_suffix(".png"), say)
    print(json.dumps(result) if options.json else report.text(result))


def measure(options: Options, tp: TensorParallel) -> Iterator[dict[str, Any]]:
    """After every setting in which something could be measured, everything so far as the JSON object."""
    compiled = compile_times(options) if options.compile_times else None
    contenders: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
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
        for context, batch in itertools.product(options.contexts, options.batches):
            measured, left_out = run_case(new_case(options, model, raw, context, batch), options)
            contenders, skipped = contenders + measured, skipped + left_out
            release(options)
            if contenders:
                yield as_object(options, about, compiled, contenders, skipped)
        del model
        release(options)
    if not contenders:
        raise ValueError(f"nothing could be measured: {report.skipped_line(skipped[0])}")


def as_object(
    options: Options,
    about: dict[str, Any],
    compiled: dict[str, float] | None,
    contenders: list[dict[str, Any]],
    skipped: list[dict[str, Any]],
) -> dict[str, Any]:
    read = statistics.median(contender["read_gb_per_s"] for contender in contenders)
    return {
        "machine": machine.describe(options.device),
        "versions": machine.versions(),
        "command": options.command,
        "model": about,
        "read_gb_per_s": round(read, 2),
        "read_by": f"the fastest of float32 {', '.join(machine.READS)}"
        if options.read_gb_per_s is None
        else "given",
        "compile_seconds": compiled,
        "reference": options.reference,
        "contenders": [*contenders],
        "scaling": scaling.lines(contenders, 1e9 * read),
        "skipped": skipped,
    }


def release(options: Options) -> None:
    """Give back what a setting has held: caches, and graphs, which hold on to the model."""
    if options.compiled:
        torch._dynamo.reset()
    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()


def load(
    options: Options, dtype: str | torch.dtype, tp: TensorParallel
) -> tuple[Transformer, dict[str, Any]]:
    """The model, or this rank's part of it, and its config.json."""
    say(f"loading {options.name} ...")
    if options.shape is not None:
        assert isinstance(dtype, torch.dtype)
        raw = shape(options.shape, options.layers)
        return random_model(raw, dtype, options.device, options.quantize, tp), raw
    folder, _ = find_folder(options.name)
    raw = json.loads((folder / "config.json").read_text())
    how = {"dtype": dtype, "device": options.device, "quantize": options.quantize, "tp": tp}
    model, _ = load_model(options.name, **how)
    return model, raw


def new_case(options: Options, model: Transformer, raw: dict[str, Any], context: int, batch: int) -> Case:
    # One turn more than is measured, and two tokens a turn: `generate` begins with one that does not count.
    new_tokens = warm_up_steps(options.period) + (options.blocks + 1) * (options.steps + 2)
    if options.profile:
        new_tokens += breakdown.steps_needed(PROFILE_ROUNDS, profile_steps(options.period))
    without_position_limit(model, context + new_tokens)
    return Case(
        model=model,
        raw=raw,
        context=context,
        batch=batch,
        new_tokens=new_tokens,
        skip_prefill=options.skip_prefill,
        compiled=options.compiled,
        attention=options.attention,
    )


def run_case(case: Case, options: Options) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All contenders in one setting: what was measured, and what could not be."""
    dtype = str(case.model.dtype).removeprefix("torch.")
    about = {"dtype": dtype, "batch": case.batch, "context": case.context}
    say(f"--- {dtype}, {case.context:,} tokens of context, batch {case.batch}")
    measured: list[Measured] = []
    skipped: list[dict[str, Any]] = []
    prefilled: set[type] = set()
    # Rivals come first: what transformers registers with the compiler, once it is used, makes earlier graphs
    # stale. Each is made when its turn comes, since what they hold is large.
    for name in [*options.against, *options.policies]:
        kind = Ours if name in options.policies else Rival
        own = replace(case, skip_prefill=case.skip_prefill or kind in prefilled)
        try:
            measured.append(begin(make_contender(name, own, options), options.device, say))
        except Exception as error:  # whatever it is, the others' numbers are worth having
            if case.model.tp.size > 1 and not isinstance(error, (ValueError, MemoryError)):
                raise  # ranks may not all have it, and be in different places
            reason = " ".join(str(error).split()) or type(error).__name__
            skipped.append({"name": name, **about, "reason": reason})
            say(f"left out: {report.skipped_line(skipped[-1])}")
        else:
            prefilled.add(kind)
    if not measured:
        return [], skipped
    speed = run_rounds(measured, options.blocks, options.steps, lambda: read_speed(options), say)
    reference = next((m for m in measured if m.contender.name == options.reference), None)
    entries = [entry(m, case, about, reference, speed) for m in measured]
    if options.profile:
        profile(measured, entries)
    return entries, skipped


def read_speed(options: Options) -> float:
    """Bytes a second that memory is read with."""
    given = options.read_gb_per_s
    return machine.measure_read(options.device) if given is None else 1e9 * given


def make_contender(name: str, case: Case, options: Options) -> Contender:
    if name in options.policies:
        return Ours(name, options.policies[name], case)
    return rival(name, case, options.kept.budget_for(case.context))


def entry(
    measured: Measured, case: Case, about: dict[str, Any], reference: Measured | None, speed: float
) -> dict[str, Any]:
    """One contender's part of the JSON object. `speed`: bytes a second that the machine read with."""
    contender, start, cache = measured.contender, measured.start, measured.contender.cache()
    ms = {name: round(value, 4) for name, value in spread(measured.samples).items()}
    step_bytes = traffic.step_bytes(case.model, cache.kept)
    return {
        "name": contender.name,
        **about,
        "lengths": case.lengths,
        "start": start.how,
        "ms_per_step": ms,
        "samples": len(measured.samples),
        "steps_per_sample": measured.steps_per_sample,
        "ratio": None if reference is None else round(ratio(measured, reference), 4),
        "tokens_per_second": round(1000 * case.batch / ms["median"], 3),
        "bytes_per_step": step_bytes,
        "read_gb_per_s": round(speed / 1e9, 2),
        "share_of_limit": round(1000 * step_bytes / speed / ms["median"], 4),
        "cache_bytes": cache.allocated,
        "cache_bytes_by_formula": traffic.kv_bytes(case.model.config, cache.kept, case.model.dtype),
        "kept_tokens": sum(cache.kept),
        "kept_tokens_by_row": cache.kept,
        "first_token_ms": _rounded(start.first_token_ms),
        "first_step_ms": _rounded(start.first_step_ms),
        "compile_seconds": round(measured.compile_seconds, 3),
        "peak_bytes": measured.peak_bytes,
        **contender.extra,
    }


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)


def profile(measured: Sequence[Measured], entries: Sequence[dict[str, Any]]) -> None:
    """Split a step of the policy that scores most often, and its first step, and put that into its entry."""
    pairs = [(m.contender, e) for m, e in zip(measured, entries, strict=True)]
    ours = [(contender, e) for contender, e in pairs if isinstance(contender, Ours)]
    if not ours:
        return
    contender, chosen = max(ours, key=lambda pair: (pair[0].eviction is not None, pair[0].refresh_share))
    steps = profile_steps(contender.period)
    chosen["profile"] = breakdown.break_down(contender, PROFILE_ROUNDS, steps, say)
    if chosen["first_step_ms"] is not None:
        say(f"{contender.name}: parts of the first step ...")
        chosen["first_step_profile"] = first_step.break_down(contender)


def profile_steps(period: int) -> int:
    """Steps of a turn: whole periods."""
    return -(-PROFILE_STEPS // period) * period


def compile_times(options: Options) -> dict[str, float]:
    """Cold and warm, of a policy with both kinds of step where there is one."""
    policies = options.policies
    periods = {name: 1 if c is None or c.refresh == "once" else c.refresh for name, c in policies.items()}
    chosen = max(periods, key=lambda name: periods[name])
    say(f"compiling {chosen}, cold and warm ...")
    argv = ["--policies", chosen, "--against", "none", "--skip-prefill", "--read-gb-per-s", "1"]
    argv += ["--blocks", "2", "--attention", options.attention, "--device", str(options.device)]
    argv += ["--context", str(options.contexts[0]), "--batch", str(options.batches[0])]
    argv += ["--shape", options.shape] if options.shape else ["--model", options.name]
    argv += ["--layers", str(options.layers)] if options.layers else []
    argv += ["--quantize", options.quantize] if options.quantize else []
    if options.dtypes[0] != "auto":
        argv += ["--dtype", str(options.dtypes[0])]
    if (eviction := policies[chosen]) is not None:
        name = "compression" if eviction.budget is None else "budget"
        argv += [f"--{name}", str(getattr(eviction, name))]
    return {name: round(seconds, 2) for name, seconds in compile_seconds(argv).items()}


if __name__ == "__main__":
    sys.exit(main())
