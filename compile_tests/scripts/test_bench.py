"""`scripts/bench.py` and `scripts/bench_table.py`: what they report, not how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import inertiakv.scripts.bench as bench
import inertiakv.scripts.bench_table as bench_table
from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.cache import memory
from inertiakv.compiling.graphs import Graphs
from inertiakv.scripts.benchmarking import (
    KVPRESS_PACKAGES,
    breakdown,
    first_step,
    measure,
    options,
    ours,
    rivals,
    scaling,
    shapes,
    traffic,
)
from inertiakv.scripts.benchmarking.contender import Case

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["--shape", "tiny", "--dtype", "float32", "--context", "100", "--steps", "4", "--blocks", "2"]
EAGER = [*QUICK, "--no-compile", "--read-gb-per-s", "10"]
KV_TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a token's K and V in the tiny shape, in float32: layers, K and V, KV heads, head dim, bytes."""
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
"""Weights of a layer of the tiny shape: q and o, k and v, MLP, norms."""


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert bench.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_name(result: dict[str, Any], **setting: Any) -> dict[str, dict[str, Any]]:
    contenders = [c for c in result["contenders"] if all(c[key] == value for key, value in setting.items())]
    return {contender["name"]: contender for contender in contenders}


def case(shape: str = "tiny", **changes: Any) -> Case:
    raw = shapes.shape(shape, None)
    model = shapes.random_model(raw, torch.float32, torch.device("cpu"))
    settings = {"context": 100, "batch": 1, "new_tokens": 40, "skip_prefill": False, "compiled": False}
    return Case(**{"model": model, "raw": raw, "attention": "auto", **settings, **changes})


@pytest.fixture(scope="module")
def both_batches() -> dict[str, Any]:
    """All that can be asked for at once, uncompiled."""
    with pytest.MonkeyPatch.context() as patch:
        written: list[dict[str, Any]] = []
        patch.setattr(bench.report, "text", lambda result: written.append(result) or "")
        patch.setattr(bench.machine, "measure_read", lambda device: 1e10)
        patch.setattr(bench.machine, "measure_multiply", lambda device: 1e11)
        argv = [arg for arg in EAGER if arg not in ("--read-gb-per-s", "10")]
        assert bench.main([*argv, "--batch", "1,3", "--profile"]) == 0
    return written[0]


def test_one_object_says_everything(both_batches: dict[str, Any]) -> None:
    assert set(both_batches["machine"]) >= {"device", "cpu", "cores", "threads", "memory_gb"}
    assert set(both_batches["versions"]) >= {"python", "torch", "transformers", "inertiakv"}
    assert both_batches["command"].startswith("python scripts/bench.py --shape tiny ")
    assert both_batches["read_gb_per_s"] == 10
    assert both_batches["compile_seconds"] is None
    assert both_batches["model"] == {
        "name": "tiny",
        "source": "made in memory",
        "layers": 2,
        "quantize": None,
        "ranks": 1,
        "parameters": 2 * LAYER + 64 + 2 * 512 * 64,
    }
    assert not both_batches["skipped"]
    json.dumps(both_batches)


def test_every_contender_in_every_setting(both_batches: dict[str, Any]) -> None:
    for batch in (1, 3):
        contenders = by_name(both_batches, batch=batch, context=100, dtype="float32")
        names = ["transformers", "transformers-static", "full", "inertiakv", "lazy4", "score_free"]
        assert list(contenders) == names
        for contender in contenders.values():
            ms = contender["ms_per_step"]
            assert 0 < ms["p10"] <= ms["median"] <= ms["p90"]
            assert contender["tokens_per_second"] == pytest.approx(1000 * batch / ms["median"], rel=1e-3)
            first_of_its_kind = contender["name"] in ("transformers", "full")
            assert contender["start"] == ("prefill" if first_of_its_kind else "synthetic prompt")
            assert (contender["first_token_ms"] is not None) == first_of_its_kind
            assert contender["lengths"] == ([100] if batch == 1 else [100, 75, 50])
            limit_ms = contender["bytes_per_step"] / 10 / 1e6
            assert contender["share_of_limit"] == pytest.approx(limit_ms / ms["median"], rel=1e-2, abs=1e-4)


def test_ratios_are_to_the_reference(both_batches: dict[str, Any]) -> None:
    assert both_batches["reference"] == "transformers"
    contenders = by_name(both_batches, batch=1)
    assert contenders["transformers"]["ratio"] == 1
    assert all(contender["ratio"] > 0 for contender in contenders.values())


def test_kept_tokens_and_bytes_follow_the_formulas(both_batches: dict[str, Any]) -> None:
    weights = 4 * (2 * LAYER + 64 + 512 * 64)  # without the embedding table, which is not the head
    for batch, budgets in ((1, [10]), (3, [10, 7, 5])):
        contenders = by_name(both_batches, batch=batch)
        for name, contender in contenders.items():
            if name in ("inertiakv", "lazy4", "score_free"):
                assert contender["kept_tokens_by_row"] == budgets
                assert contender["first_step_ms"] > 0
            else:
                assert min(contender["kept_tokens_by_row"]) > min(contender["lengths"])
                assert contender["first_step_ms"] is None
            assert contender["kept_tokens"] == sum(contender["kept_tokens_by_row"])
            assert contender["cache_bytes_by_formula"] == contender["kept_tokens"] * KV_TOKEN
            assert contender["bytes_per_step"] == weights + contender["kept_tokens"] * KV_TOKEN
            assert contender["cache_bytes"] >= contender["cache_bytes_by_formula"]


def test_samples_of_a_lazy_policy_are_whole_periods(both_batches: dict[str, Any]) -> None:
    contenders = by_name(both_batches, batch=1)
    assert (contenders["inertiakv"]["samples"], contenders["inertiakv"]["steps_per_sample"]) == (8, 1)
    assert (contenders["lazy4"]["samples"], contenders["lazy4"]["steps_per_sample"]) == (2, 4)
    assert set(contenders["lazy4"]["ms_by_kind"]) == {"refresh", "plain"}
    assert contenders["inertiakv"]["ms_by_kind"] is None


def test_profile_of_the_policy_that_scores_most(both_batches: dict[str, Any]) -> None:
    assert [c["name"] for c in both_batches["contenders"] if c.get("profile")] == ["inertiakv"] * 2
    profile = by_name(both_batches, batch=1)["inertiakv"]["profile"]
    parts = {"attention", "eviction", "mlp", "head_and_sampling", "rest", "scoring", "host"}
    assert set(profile["ms"]) == parts
    assert all(ms >= 0 for ms in profile["ms"].values())
    assert "left out" in profile["method"]
    weights, batch = 2 * LAYER + 64 + 512 * 64, by_name(both_batches, batch=3)["inertiakv"]
    least = batch["profile"]["at_least_ms"]
    assert least["reading"] == pytest.approx(1e3 * batch["bytes_per_step"] / 1e10, abs=1e-4)
    heads = 4 * 16
    flops = 3 * 2 * weights + 2 * 4 * heads * batch["kept_tokens"]
    assert least["arithmetic"] == pytest.approx(1e3 * flops / 1e11, abs=1e-4)


def test_profile_of_the_first_step(both_batches: dict[str, Any]) -> None:
    profiles = [c["first_step_profile"] for c in both_batches["contenders"] if c.get("first_step_profile")]
    assert len(profiles) == 2
    for profile in profiles:
        assert set(profile["ms"]) == {*first_step.GROUPS, "other_operators", "host"}
        assert all(ms >= 0 for ms in profile["ms"].values())
        assert profile["ms"]["matrix_products"] > 0
        assert profile["ms"]["gathers_and_scatters"] > 0


def test_profile_of_a_rule_whose_steps_do_not_score() -> None:
    """Not even could, by what it scores the prompt with."""
    contender = ours.Ours("kvzip", policy("kvzip", budget=20), case())
    contender.start()
    profile = breakdown.break_down(contender, 1, 1, print)
    assert profile["ms"]["scoring"] == 0
    assert sum(first_step.break_down(contender)["ms"].values()) > 0


def test_operators_belong_to_a_part_of_the_first_step() -> None:
    assert first_step.group("aten::bmm") == first_step.group("aten::_weight_int8pack_mm") == "matrix_products"
    assert first_step.group("aten::index_select") == "gathers_and_scatters"
    assert first_step.group("aten::exp") == "other_operators"


def nodes_of_a_step(contender: ours.Ours) -> int:
    """Operations in the graph that a decode step is compiled from."""
    counts: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        modules = [m for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
        counts.append(sum(len(m.graph.nodes) for m in modules))
        return module.forward

    graphs = Graphs(True, contender.device)
    graphs._compile = lambda _, function, static, record: torch.compile(  # type: ignore[method-assign]
        lambda *args: function(*args, **static), backend=backend, fullgraph=True, dynamic=False
    )
    with torch.no_grad():
        breakdown.step(contender, graphs, "step", refresh=False)
    torch._dynamo.reset()
    (count,) = counts
    return count


def test_every_function_of_a_profile_is_part_of_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a profile would find, wrongly, that it takes no time."""
    parts, hit = dict(breakdown.PARTS), set()
    for shape, attention in (("tiny", "dense"), ("tiny-moe", "flex")):
        setting = case(shape, compiled=True, attention=attention, skip_prefill=True)
        contender = ours.Ours("inertiakv", policy("inertiakv", budget=10), setting)
        contender.start()
        whole = nodes_of_a_step(contender)
        for part, patches in parts.items():
            for patch in set(patches) - hit:
                monkeypatch.setitem(breakdown.PARTS, part, (patch,))
                with breakdown.changed(part):
                    if nodes_of_a_step(contender) != whole:
                        hit.add(patch)
    assert hit == {patch for patches in parts.values() for patch in patches}


def test_tables_show_every_contender(both_batches: dict[str, Any], tmp_path: Path) -> None:
    text = bench.report.text(both_batches)
    (tmp_path / "here.json").write_text(json.dumps(both_batches))
    assert bench_table.main(["--folder", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    for contender in both_batches["contenders"]:
        assert f"{contender['ms_per_step']['median']:.2f}" in text
        assert f"| {contender['name']} | {contender['ms_per_step']['median']:.2f} |" in page
    assert both_batches["command"] in page
    assert "batch 3 (50 to 100 tokens a row)" in text
    assert bench_table.main(["--folder", str(tmp_path), "--check"]) == 0
    (tmp_path / "README.md").write_text(page + "by hand")
    assert bench_table.main(["--folder", str(tmp_path), "--check"]) == 1


def test_page_of_this_checkout_is_what_its_files_give() -> None:
    folder = ROOT / "benchmarks"
    assert list(folder.glob("*.json"))
    assert (folder / "README.md").read_text() == bench_table.make_page(folder)


def test_compiled_without_what_only_other_scripts_need() -> None:
    """As on a bare machine: neither the command-line packages nor an installed checkout."""
    program = (
        "import sys, runpy\n"
        "for name in ('tyro', 'tqdm', 'docstring_parser', 'jinja2', 'gguf', 'matplotlib', 'pytest',\n"
        "             'torchao'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['bench.py', *sys.argv[1:]]\n"
        f"runpy.run_path({str(ROOT / 'scripts' / 'bench.py')!r}, run_name='__main__')\n"
    )
    argv = [*QUICK, "--policies", "lazy4", "--against", "none", "--skip-prefill", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["read_gb_per_s"] > 0.5
    assert "float32" in result["read_by"]
    lazy4 = by_name(result)["lazy4"]
    graphs = lazy4["graphs"]
    assert (graphs["compiled"], graphs["breaks"], graphs["recompiles"]) == (1, 0, 0)
    assert lazy4["compile_seconds"] > 0
    assert lazy4["start"] == "synthetic prompt"
    assert lazy4["first_token_ms"] is None
    assert lazy4["first_step_ms"] > 0
    assert lazy4["kept_tokens"] == 10


def test_synthetic_prompts_leave_caches_as_prefill_does(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*EAGER, "--batch", "3", "--against", "transformers,transformers-static"]
    real, synthetic = run(capsys, *argv), run(capsys, *argv, "--skip-prefill")
    assert {c["start"] for c in synthetic["contenders"]} == {"synthetic prompt"}
    for before, after in zip(real["contenders"], synthetic["contenders"], strict=True):
        for key in ("name", "kept_tokens_by_row", "bytes_per_step", "cache_bytes"):
            assert before[key] == after[key]


def test_context_may_exceed_positions(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*EAGER, "--context", "600", "--policies", "full,inertiakv", "--against", "none", "--budget", "33"]
    result = run(capsys, *argv)
    assert result["reference"] == "full"
    assert by_name(result)["inertiakv"]["kept_tokens"] == 33
    assert by_name(result)["full"]["kept_tokens"] > 600


def test_a_prompt_that_does_not_fit_is_taken_as_evicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 5_000_000)
    argv = [*EAGER, "--context", "20000", "--batch", "2", "--skip-prefill", "--against", "none"]
    result = run(capsys, *argv, "--policies", "full,inertiakv")
    assert [(s["name"], s["context"], s["batch"]) for s in result["skipped"]] == [("full", 20000, 2)]
    assert "cache" in result["skipped"][0]["reason"]
    (contender,) = result["contenders"]
    assert contender["start"] == "evicted cache"
    assert contender["kept_tokens_by_row"] == [2000, 1000]
    assert contender["first_step_ms"] is None
    assert contender["ratio"] is None
    assert bench.main([*argv, "--policies", "full"]) == 2
    assert "nothing could be measured: full" in capsys.readouterr().err


def test_merged_results_stand_beside_new_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = [*EAGER, "--against", "none"]
    other = run(capsys, *argv, "--policies", "score_free", "--out", str(tmp_path / "other.json"))
    assert json.loads((tmp_path / "other.json").read_text()) == other
    result = run(capsys, *argv, "--policies", "full", "--merge", str(tmp_path / "other.json"))
    full, merged = result["contenders"]
    assert merged["merged_from"]["name"] == "other.json"
    theirs, ours = merged["ms_per_step"]["median"], full["ms_per_step"]["median"]
    assert merged["ratio"] == pytest.approx(theirs / ours, abs=1e-4)


def test_what_is_broken_off_leaves_what_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_case, out = bench.run_case, tmp_path / "out.json"

    def broken_off(case: Case, options: options.Options) -> Any:
        if case.batch == 3:
            raise KeyboardInterrupt
        return run_case(case, options)

    monkeypatch.setattr(bench, "run_case", broken_off)
    argv = [*EAGER, "--policies", "full", "--against", "none", "--batch", "1,2,3", "--out", str(out)]
    assert bench.main(argv) == 130
    assert [contender["batch"] for contender in bench.results.read(out)["contenders"]] == [1, 2]
    assert list(tmp_path.iterdir()) == [out]


def test_batches_are_set_against_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*EAGER, "--policies", "full", "--against", "none"]
    result = run(capsys, *argv, "--batch", "1,2")
    one, two = (contender["tokens_per_second"] for contender in result["contenders"])
    (_, (row1,)), (_, (row2,)) = bench.report.cases(result)
    assert (row1["of batch 1"], row2["of batch 1"]) == ("", f"{two / one:.2f}")


def test_time_as_a_line_in_kept_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """5 ms a step, and 2 ms more for every 1,000 tokens of 4,000 bytes: 2 GB/s."""

    def contender(name: str, kept: int) -> dict[str, Any]:
        setting = {"name": name, "dtype": "float32", "batch": 1, "context": 2 * kept, "kept_tokens": kept}
        sizes = {"cache_bytes_by_formula": 4000 * kept, "bytes_per_step": 4000 * kept + 30_000_000}
        return {**setting, **sizes, "ms_per_step": {"median": 5 + 2 * kept / 1000}}

    measured = [contender("a", kept) for kept in (255, 4095, 65535)] + [contender("b", 1), contender("b", 2)]
    (line,) = scaling.lines(measured, bytes_per_second=10e9)
    assert (line["name"], line["kept_tokens"]) == ("a", [255, 4095, 65535])
    assert (line["kept_gb_per_s"], line["intercept_ms"]) == (2, 5)
    assert (line["weights_ms"], line["added_ms"], line["worst_deviation"]) == (3, 2, 0)
    assert "5.00 ms a step" in bench.report.scaling_line(line)

    argv = [*EAGER, "--policies", "score_free", "--compression", "0", "--against", "none", "--skip-prefill"]
    result = run(capsys, *argv, "--context", "63,127,255")
    assert [line["kept_tokens"] for line in result["scaling"]] == [[63, 127, 255]]


def test_slow_contenders_make_fewer_steps() -> None:
    class Slow:
        period = 4

    measured = measure.Measured(Slow(), measure.Start("prefill"), None, last_ms=90.0)  # type: ignore[arg-type]
    assert measure.block_steps(measured, 16) == 8
    measured.rounds.append([1000.0, 3000.0])
    assert measure.block_steps(measured, 16) == 4
    measured.rounds.append([1.0] * 9)
    assert measure.block_steps(measured, 16) == 16


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_rivals_have_our_weights_and_give_our_tokens(shape: str) -> None:
    setting = case(shape)
    hf = rivals.transformers_model(setting)
    ours = {parameter.data_ptr() for parameter in setting.model.parameters()}
    assert {parameter.data_ptr() for parameter in hf.parameters()} <= ours
    assert not any(parameter.requires_grad for parameter in setting.model.parameters())
    (prompt,) = setting.prompts()
    out = hf.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    decoder = Decoder(setting.model, None, compile=False)
    assert out[0, len(prompt) :].tolist() == decoder.generate(prompt, 8, eos_token_ids=()).tokens[0]


def test_rivals_go_on_with_their_caches() -> None:
    setting = case(batch=2)
    expected = Decoder(setting.model, None, compile=False).generate(setting.prompts(), 12, eos_token_ids=())
    for name in ("transformers", "transformers-static"):
        contender = rivals.Transformers(name, setting, 10)
        contender.start()
        assert len(contender.steps(4)) == 4
        assert len(contender.steps(5)) == 5
        generated = contender.ids[:, 100:].tolist()
        assert generated == expected.tokens
        assert contender.cache().kept == [111, 61]


def test_generate_evicts_as_our_decoder_does() -> None:
    setting = case(batch=2)
    rule = EvictionConfig(budget=10)
    expected = Decoder(setting.model, rule, compile=False).generate(setting.prompts(), 12, eos_token_ids=())
    contender = rivals.Transformers("transformers-inertiakv", setting, 10)
    contender.start()
    contender.steps(4)
    contender.steps(5)
    assert contender.ids[:, 100:].tolist() == expected.tokens
    assert contender.cache().kept == [10, 10]
    assert contender.cache().allocated == expected.stats.cache_bytes


def test_experts_count_as_far_as_rows_choose_them() -> None:
    """A token reads the experts that it chooses, and tokens that choose at random some of them together."""
    raw = shapes.shape("qwen3-30b-a3b", 2)
    with torch.device("meta"):
        model = shapes.Transformer(shapes.parse_config(raw)).to(torch.bfloat16)
    expert = 3 * 2048 * 768
    other = 2 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048 + 128 * 2048) + 2048 + 151936 * 2048
    assert traffic.weight_bytes(model, 1) == 2 * (2 * 8 * expert + other)
    chosen = 128 * (1 - (120 / 128) ** 8)
    assert 51 < chosen < 52
    assert traffic.weight_bytes(model, 8) == pytest.approx(2 * (2 * chosen * expert + other), abs=1)
    assert traffic.weight_bytes(model, 1000) == pytest.approx(2 * (2 * 128 * expert + other), abs=1)


def test_quantised_weights_count_as_the_bytes_that_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*EAGER, "--policies", "score_free", "--against", "none", "--quantize", "int8"]
    result = run(capsys, *argv)
    assert result["model"]["quantize"] == "int8"
    norms, outputs = 5 * 64, 2 * (2 * 64 + 2 * 32 + 2 * 128 + 64) + 512
    matrices = 2 * (LAYER - 2 * 64) + 512 * 64
    kept = KV_TOKEN * result["contenders"][0]["kept_tokens"]
    assert result["contenders"][0]["bytes_per_step"] - kept == matrices + 4 * (outputs + norms)


def test_sliding_layers_read_their_window_alone() -> None:
    raw = {**shapes.shape("tiny", None), "model_type": "mistral", "sliding_window": 64}
    raw["architectures"] = ["MistralForCausalLM"]
    model = shapes.random_model(raw, torch.float32, torch.device("cpu"))
    assert traffic.step_bytes(model, [100, 10]) - traffic.weight_bytes(model, 2) == (64 + 10) * KV_TOKEN


@pytest.mark.parametrize("name", list(shapes.SHAPES))
def test_shapes_are_what_both_sides_can_read(name: str) -> None:
    with torch.device("meta"):
        model = shapes.Transformer(shapes.parse_config(shapes.shape(name, 2)))
    assert model.config.num_layers == 2
    assert traffic.weight_bytes(model, 1) > 0


def test_compile_times_are_of_both_kinds_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def record(argv: list[str]) -> dict[str, float]:
        asked.append(argv)
        return {"cold": 2.0, "warm": 1.0}

    monkeypatch.setattr(bench, "compile_seconds", record)
    wanted = options.parse([*QUICK, "--batch", "2", "--budget", "20", "--compile-times"], None)
    assert bench.compile_times(wanted) == {"cold": 2.0, "warm": 1.0}
    child = options.parse(asked[0], None)
    assert list(child.policies) == ["lazy4"]
    assert child.policies["lazy4"].budget == 20  # type: ignore[union-attr]
    same = ("shape", "layers", "batches", "dtypes", "device", "attention", "contexts")
    assert [getattr(child, name) for name in same] == [getattr(wanted, name) for name in same]
    assert child.skip_prefill
    assert not child.against


def test_samples_and_spread() -> None:
    assert measure.by_period([1.0, 3.0, 5.0, 7.0], 2, 4) == [2.0, 6.0]
    assert measure.by_period([4.0], 2, 4) == [4.0]  # the mean of a block, where no more is known
    assert measure.spread([float(n) for n in range(11)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}


def test_chart_where_matplotlib_is(both_batches: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    breakdown.draw(both_batches["contenders"], tmp_path / "parts.png", print)
    assert (tmp_path / "parts.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--shape", "llama-9"], "unknown shape 'llama-9'; choose from smollm2-135m"),
        (["--model", "m", "--shape", "tiny"], "give --model or --shape, not both"),
        (["--layers", "2"], "--layers has no effect without --shape"),
        (["--policies", "greedy"], "unknown policy 'greedy'; choose from full"),
        (["--against", "vllm"], "unknown rival 'vllm'; choose from transformers"),
        (["--policies", "none", "--against", "none"], "nothing to measure"),
        (["--policies", "full", "--against", "none", "--budget", "5"], "--budget has no effect"),
        (["--compression", "1.5"], "compression must be a number in [0, 1)"),
        (["--budget", "9", "--compression", "0.5"], "give compression (0.5) or budget (9), not both"),
        (["--policies", "lazy4", "--steps", "6"], "--steps 6 cuts schedules in pieces; give a multiple of 4"),
        (["--reference", "lazy9"], "--reference lazy9 is not measured; choose from"),
        (["--policies", "none", "--profile"], "--profile needs a policy"),
        (["--quantize", "int3"], "invalid choice: 'int3'"),
        (["--quantize", "int8"], "transformers cannot share quantised weights: give --against none"),
        (["--compile-times", "--no-compile"], "--compile-times needs a policy that is compiled"),
        (["--context", "0"], "'0' is no whole number of at least 1"),
        (["--dtype", "int3"], "dtype 'int3' is not supported"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--merge", "missing.json"], "missing.json"),
        (["--out", "nowhere/out.json"], "no folder nowhere for --out"),
        (["--speed"], "unrecognized arguments: --speed"),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--shape", "tiny", *argv] if "--merge" in argv else argv) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_kvpress_says_how_to_run_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    assert bench.main(["--against", "kvpress"]) == 2
    assert f"pip install {KVPRESS_PACKAGES}" in capsys.readouterr().err


def test_kvpress_keeps_its_budget() -> None:
    pytest.importorskip("kvpress")
    setting = case(new_tokens=60)
    loose = rivals.KVPress("kvpress", setting, 1000)
    loose.start()
    loose.steps(10)
    expected = Decoder(setting.model, None, compile=False).generate(setting.prompts(), 12, eos_token_ids=())
    assert loose.token.item() == expected.tokens[0][-1]  # the first, the first step's, and ten
    for name, kept in (("kvpress", [10, 10, 10, 10]), ("kvpress4", [11, 12, 13, 10])):
        contender = rivals.KVPress(name, setting, 10)
        contender.start()
        assert [contender.steps(1) and contender.cache().kept[0] for _ in range(4)] == kept


def test_other_files_are_no_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[1]")
    assert bench.main(["--shape", "tiny", "--merge", str(tmp_path / "other.json")]) == 2
    assert "is no results file" in capsys.readouterr().err
    assert bench_table.main(["--folder", str(tmp_path)]) == 2
    assert bench_table.main(["--folder", str(tmp_path / "empty")]) == 2


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--help"])
    assert exit_.value.code == 0
    assert "python scripts/bench.py --shape llama-3.1-8b" in capsys.readouterr().out
