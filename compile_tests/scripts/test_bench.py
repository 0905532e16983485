"""`scripts/bench.py` and `scripts/bench_table.py`: what they report, not how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.cache import memory
from inertiakv.compiling.graphs import Graphs
from inertiakv.scripts import bench, bench_table
from inertiakv.scripts.benchmarking import (
    breakdown,
    machine,
    measure,
    options,
    ours,
    report,
    results,
    rivals,
    shapes,
    traffic,
)
from inertiakv.scripts.benchmarking.measure import Case

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--shape", "tiny", "--layers", "1", "--dtype", "float32"]
QUICK = [*TINY, "--context", "100", "--steps", "4", "--blocks", "2"]
EAGER = [*QUICK, "--no-compile", "--read-gb-per-s", "10"]
KV_TOKEN = 2 * 2 * 16 * 4
"""Bytes of a token's K and V in that shape: K and V, KV heads, head dim, bytes."""
MATRICES, NORMS, HEAD = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128, 3 * 64, 512 * 64
"""Its weights: q and o, k and v, MLP; norms; vocabulary head."""


@pytest.fixture(autouse=True, scope="module")
def steady() -> Iterator[None]:
    """Numbers that do not depend on how busy the machine is: with one thread, small tensors are as fast as
    with several, and no block has fewer steps than asked for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "BLOCK_MS", 1e9)
        yield
    torch.set_num_threads(threads)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert bench.main([*EAGER, *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_name(result: dict[str, Any], batch: int = 1) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in result["contenders"] if entry["batch"] == batch}


def case(shape: str = "tiny", **changes: Any) -> Case:
    raw = shapes.shape(shape, 1)
    model = shapes.random_model(raw, torch.float32, torch.device("cpu"))
    settings = {"context": 100, "batch": 1, "new_tokens": 40, "skip_prefill": False, "compile": False}
    settings |= {"kept": EvictionConfig(budget=10), "attention": "auto", "model": model, "raw": raw}
    return Case(**settings | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    """All that can be asked for at once, uncompiled."""
    with pytest.MonkeyPatch.context() as patch:
        written: list[dict[str, Any]] = []
        patch.setattr(report, "text", lambda result: written.append(result) or "")
        patch.setattr(machine, "measure_read", lambda device: 1e10)
        patch.setattr(breakdown, "ROUNDS", 2)
        assert bench.main([*QUICK, "--no-compile", "--batch", "1,3", "--profile"]) == 0
    return written[0]


def test_one_object_says_everything(everything: dict[str, Any]) -> None:
    assert set(everything["machine"]) >= {"device", "cpu", "cores", "threads", "memory_gb"}
    assert set(everything["versions"]) >= {"python", "torch", "transformers", "inertiakv"}
    assert everything["command"].startswith("python scripts/bench.py --shape tiny ")
    assert everything["read_gb_per_s"] == 10
    assert everything["compile_seconds"] is None
    assert everything["model"] == {
        "name": "tiny",
        "source": "made in memory",
        "layers": 1,
        "quantize": None,
        "ranks": 1,
        "parameters": MATRICES + NORMS + 2 * HEAD,
    }
    assert not everything["skipped"]
    json.dumps(everything)


@pytest.mark.parametrize("batch, lengths, budgets", [(1, [100], [10]), (3, [100, 75, 50], [10, 7, 5])])
def test_every_contender_in_every_setting(
    everything: dict[str, Any], batch: int, lengths: list[int], budgets: list[int]
) -> None:
    entries = by_name(everything, batch)
    names = ["transformers", "transformers-static", "full", "inertiakv", "lazy4", "score_free"]
    assert list(entries) == names
    assert everything["reference"] == "transformers"
    assert entries["transformers"]["ratio"] == 1
    for name, entry in entries.items():
        ms = entry["ms_per_step"]
        assert 0 < ms["p10"] <= ms["median"] <= ms["p90"]
        assert entry["tokens_per_second"] == pytest.approx(1000 * batch / ms["median"], rel=1e-3)
        assert entry["ratio"] > 0
        first_of_its_kind = name in ("transformers", "full")
        assert entry["start"] == ("prefill" if first_of_its_kind else "synthetic prompt")
        assert (entry["first_token_ms"] is not None) == first_of_its_kind
        assert entry["lengths"] == lengths
        if name in ("inertiakv", "lazy4", "score_free"):
            assert entry["kept_tokens_by_row"] == budgets
            assert entry["first_step_ms"] > 0
        else:
            assert min(entry["kept_tokens_by_row"]) > min(lengths)
            assert entry["first_step_ms"] is None
        assert entry["kept_tokens"] == sum(entry["kept_tokens_by_row"])
        assert entry["cache_bytes_by_formula"] == entry["kept_tokens"] * KV_TOKEN
        assert entry["cache_bytes"] >= entry["cache_bytes_by_formula"]
        # Without the embedding table, which is not the head.
        assert entry["bytes_per_step"] == 4 * (MATRICES + NORMS + HEAD) + entry["kept_tokens"] * KV_TOKEN
        limit_ms = entry["bytes_per_step"] / 10 / 1e6
        assert entry["share_of_limit"] == pytest.approx(limit_ms / ms["median"], rel=1e-2, abs=1e-4)


def test_samples_of_a_lazy_policy_are_whole_periods(everything: dict[str, Any]) -> None:
    each, lazy4 = by_name(everything)["inertiakv"], by_name(everything)["lazy4"]
    assert (each["samples"], each["steps_per_sample"], each["ms_by_kind"]) == (8, 1, None)
    assert (lazy4["samples"], lazy4["steps_per_sample"]) == (2, 4)
    assert set(lazy4["ms_by_kind"]) == {"refresh", "plain"}


def test_the_steps_after_the_warm_up_are_sorted_by_kind() -> None:
    lazy4 = ours.Ours("lazy4", case(), policy("lazy4", budget=10))
    lazy4._schedule_start = 1
    lazy4.step_ms = [100.0] * measure.warm_up_steps(4) + [2, 2, 1, 2, 2, 2, 1, 2]
    assert lazy4._ms_by_kind() == {"refresh": 1, "plain": 2}


def test_profiles_of_the_policy_that_scores_most(everything: dict[str, Any]) -> None:
    assert [c["name"] for c in everything["contenders"] if c.get("profile")] == ["inertiakv"] * 2
    for batch in (1, 3):
        entry = by_name(everything, batch)["inertiakv"]
        step = entry["profile"]
        assert set(step["ms"]) == {*breakdown.PARTS, "rest", "scoring", "host"}
        assert min(step["ms"].values()) >= 0


def test_profile_of_a_policy_whose_steps_do_not_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvzip's could not even, by what it scores the prompt with."""
    monkeypatch.setattr(breakdown, "ROUNDS", 1)
    contender = ours.Ours("kvzip", case(new_tokens=80), policy("kvzip", budget=20))
    contender.start()
    assert breakdown.of_step(contender)["ms"]["scoring"] == 0


def nodes_of_a_step(contender: ours.Ours) -> int:
    """Operations in the graph that a decode step is compiled from."""
    counts: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        modules = [m for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
        counts.append(sum(len(m.graph.nodes) for m in modules))
        return lambda *args: ()  # the graph is not run

    graphs = Graphs(True, contender.device)
    graphs._compile = lambda _, function, static, capture: torch.compile(  # type: ignore[method-assign]
        lambda *args: function(*args, **static), backend=backend, fullgraph=True, dynamic=False
    )
    with torch.no_grad():
        breakdown.run_step(contender, graphs, "step", refresh=False)
    torch._dynamo.reset()
    (count,) = counts
    return count


def test_every_function_of_a_profile_is_part_of_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a profile would say, wrongly, that it takes no time."""
    parts, hit = dict(breakdown.PARTS), set()
    for shape, attention in (("tiny", "dense"), ("tiny-moe", "flex")):
        setting = case(shape, compile=True, attention=attention, skip_prefill=True)
        contender = ours.Ours("inertiakv", setting, policy("inertiakv", budget=10))
        contender.start()
        whole = nodes_of_a_step(contender)
        for part, patches in parts.items():
            for patch in set(patches) - hit:
                monkeypatch.setitem(breakdown.PARTS, part, (patch,))
                with breakdown.changed(part):
                    if nodes_of_a_step(contender) != whole:
                        hit.add(patch)
    assert hit == {patch for patches in parts.values() for patch in patches}


def test_tables_show_every_contender(everything: dict[str, Any], tmp_path: Path) -> None:
    text = report.text(everything)
    (tmp_path / "here.json").write_text(json.dumps(everything))
    assert bench_table.main([str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    for entry in everything["contenders"]:
        assert f"{entry['ms_per_step']['median']:.2f}" in text
        assert f"| {entry['name']} | {entry['ms_per_step']['median']:.2f} |" in page
    assert everything["command"] in page
    assert "batch 3 (50 to 100 tokens a row)" in text
    (_, rows1), (_, rows3) = report.cases(everything)
    one, three = (by_name(everything, batch)["full"]["tokens_per_second"] for batch in (1, 3))
    assert (rows1[2]["of batch 1"], rows3[2]["of batch 1"]) == ("", f"{three / one:.2f}")


def test_chart_where_matplotlib_is(everything: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw(everything["contenders"], tmp_path / "parts.png")
    assert (tmp_path / "parts.png").stat().st_size > 1000


def test_page_of_this_checkout_is_what_its_files_give() -> None:
    folder = ROOT / "benchmarks"
    assert (folder / "README.md").read_text() == bench_table.make_page(folder)


@pytest.mark.slow
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
    assert (lazy4["start"], lazy4["first_token_ms"]) == ("synthetic prompt", None)
    assert lazy4["first_step_ms"] > 0
    assert lazy4["kept_tokens"] == 10


def test_synthetic_prompts_leave_caches_as_prefill_does(
    everything: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--batch", "3", "--policies", "full,inertiakv", "--against", "transformers,transformers-static"]
    synthetic = by_name(run(capsys, *argv, "--skip-prefill"), 3)
    assert {entry["start"] for entry in synthetic.values()} == {"synthetic prompt"}
    real = by_name(everything, 3)
    for name, entry in synthetic.items():
        assert entry["bytes_per_step"] == real[name]["bytes_per_step"]
        assert entry["kept_tokens_by_row"] == real[name]["kept_tokens_by_row"]


def test_context_may_exceed_positions(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--context", "600", "--policies", "full,inertiakv", "--against", "none", "--budget", "33"]
    result = run(capsys, *argv)
    assert result["reference"] == "full"
    assert by_name(result)["inertiakv"]["kept_tokens"] == 33
    assert by_name(result)["full"]["kept_tokens"] > 600


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_is_taken_as_evicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2_500_000)
    argv = ["--context", "20000", "--batch", "2", "--skip-prefill", "--against", "none"]
    result = run(capsys, *argv, "--policies", "full,inertiakv")
    assert [(s["name"], s["context"], s["batch"]) for s in result["skipped"]] == [("full", 20000, 2)]
    assert "cache" in result["skipped"][0]["reason"]
    (entry,) = result["contenders"]
    assert entry["start"] == "evicted cache"
    assert entry["kept_tokens_by_row"] == [2000, 1000]
    assert (entry["first_step_ms"], entry["ratio"]) == (None, None)
    assert bench.main([*EAGER, *argv, "--policies", "full"]) == 2
    assert "nothing could be measured: full" in capsys.readouterr().err


@pytest.mark.slow
def test_merged_results_stand_beside_new_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, argv = tmp_path / "other.json", ["--against", "none", "--policies"]
    other = run(capsys, *argv, "score_free", "--out", str(file))
    assert results.read(file) == other
    full, merged = run(capsys, *argv, "full", "--merge", str(file))["contenders"]
    assert merged["merged_from"]["name"] == "other.json"
    theirs, own = merged["ms_per_step"]["median"], full["ms_per_step"]["median"]
    assert merged["ratio"] == pytest.approx(theirs / own, abs=1e-4)


def test_an_interrupted_run_leaves_what_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_case, out = bench.run_case, tmp_path / "out.json"

    def interrupted(case: Case, options: options.Options) -> Any:
        if case.batch == 3:
            raise KeyboardInterrupt
        return run_case(case, options)

    monkeypatch.setattr(bench, "run_case", interrupted)
    argv = [*EAGER, "--policies", "full", "--against", "none", "--batch", "1,2,3", "--out", str(out)]
    assert bench.main(argv) == 130
    assert [entry["batch"] for entry in results.read(out)["contenders"]] == [1, 2]
    assert list(tmp_path.iterdir()) == [out]


def test_slow_contenders_make_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "BLOCK_MS", 1000)
    slow = ours.Ours("lazy4", case(), policy("lazy4"))
    slow.last_ms = 90.0
    for samples, steps in (([], 8), ([1000.0, 3000.0], 4), ([1.0] * 9, 16)):
        slow.rounds.append(samples)
        assert measure.block_steps(slow, 16) == steps


def test_samples_and_spread() -> None:
    assert measure.by_period([1.0, 3.0, 5.0, 7.0], 2, 4) == [2.0, 6.0]
    assert measure.by_period([4.0], 2, 4) == [4.0]  # the mean of a block, if no more is known
    assert measure.spread([float(n) for n in range(11)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_rivals_have_our_weights_and_give_our_tokens(shape: str) -> None:
    setting = case(shape)
    hf = rivals.transformers_model(setting)
    own = {parameter.data_ptr() for parameter in setting.model.parameters()}
    assert {parameter.data_ptr() for parameter in hf.parameters()} <= own
    assert not any(parameter.requires_grad for parameter in setting.model.parameters())
    (prompt,) = setting.prompts()
    out = hf.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    decoder = Decoder(setting.model, None, compile=False)
    assert out[0, len(prompt) :].tolist() == decoder.generate(prompt, 8, eos_token_ids=()).tokens[0]


@pytest.mark.parametrize(
    "name, eviction, kept",
    [
        ("transformers", None, [111, 61]),
        ("transformers-static", None, [111, 61]),
        ("transformers-inertiakv", EvictionConfig(budget=10), [10, 10]),
    ],
)
def test_rivals_go_on_with_their_caches(name: str, eviction: EvictionConfig | None, kept: list[int]) -> None:
    setting = case(batch=2)
    decoder = Decoder(setting.model, eviction, compile=False)
    expected = decoder.generate(setting.prompts(), 12, eos_token_ids=())
    contender = rivals.Transformers(name, setting)
    contender.start()
    assert [len(contender.steps(count)) for count in (4, 5)] == [4, 5]
    assert contender.ids[:, 100:].tolist() == expected.tokens
    assert contender.kept() == kept
    if eviction is not None:
        assert contender.cache_bytes() == expected.stats.cache_bytes


def test_kvpress_says_how_to_run_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    assert bench.main(["--against", "kvpress"]) == 2
    assert f"pip install {rivals.KVPRESS_PACKAGES}" in capsys.readouterr().err


def test_kvpress_keeps_its_budget() -> None:
    pytest.importorskip("kvpress")
    setting = case(new_tokens=60, kept=EvictionConfig(budget=1000))
    loose = rivals.KVPress("kvpress", setting)
    loose.start()
    loose.steps(10)
    expected = Decoder(setting.model, None, compile=False).generate(setting.prompts(), 12, eos_token_ids=())
    assert loose.token.item() == expected.tokens[0][-1]  # the first, the first step's, and ten
    for name, kept in (("kvpress", [10, 10, 10, 10]), ("kvpress4", [11, 12, 13, 10])):
        contender = rivals.KVPress(name, case(new_tokens=60))
        contender.start()
        assert [contender.steps(1) and contender.kept()[0] for _ in range(4)] == kept


def test_experts_count_as_far_as_rows_choose_them() -> None:
    """A token reads the experts that it chooses, and tokens that choose at random some of them together."""
    with torch.device("meta"):
        raw = shapes.shape("qwen3-30b-a3b", 2)
        model = shapes.Transformer(shapes.parse_config(raw)).to(torch.bfloat16)
    expert = 3 * 2048 * 768
    other = 2 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048 + 128 * 2048) + 2048 + 151936 * 2048
    for batch, chosen in ((1, 8), (8, 128 * (1 - (120 / 128) ** 8)), (1000, 128)):
        expected = 2 * (2 * chosen * expert + other)
        assert traffic.weight_bytes(model, batch) == pytest.approx(expected, abs=1)


def test_quantised_weights_count_as_the_bytes_that_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "--policies", "score_free", "--against", "none", "--quantize", "int8")
    assert result["model"]["quantize"] == "int8"
    outputs = 2 * 64 + 2 * 32 + 2 * 128 + 64 + 512  # a scale each
    (entry,) = result["contenders"]
    weights = entry["bytes_per_step"] - KV_TOKEN * entry["kept_tokens"]
    assert weights == MATRICES + HEAD + 4 * (outputs + NORMS)


def test_sliding_layers_read_their_window_alone() -> None:
    raw = {**shapes.shape("tiny", 1), "model_type": "mistral", "sliding_window": 64}
    raw["architectures"] = ["MistralForCausalLM"]
    model = shapes.random_model(raw, torch.float32, torch.device("cpu"))
    assert traffic.step_bytes(model, [100, 10]) - traffic.weight_bytes(model, 2) == (64 + 10) * KV_TOKEN


def test_compile_times_are_of_both_kinds_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[options.Options] = []
    monkeypatch.setattr(bench, "in_new_process", lambda options: asked.append(options) or 2.004)
    wanted = options.parse([*QUICK, "--batch", "2,1", "--budget", "20", "--compile-times"], None)
    assert bench.compile_times(wanted) == {"cold": 2.0, "warm": 2.0}
    assert asked[0] == asked[1]
    assert asked[0].rules == {"lazy4": policy("lazy4", budget=20)}
    assert (asked[0].batch, asked[0].against, asked[0].skip_prefill) == ([2], [], True)


@pytest.mark.slow
def test_the_cache_on_disk_saves_compiling() -> None:
    seconds = bench.compile_times(options.parse([*QUICK, "--policies", "score_free"], None))
    assert 0 < seconds["warm"] < seconds["cold"]


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
        (["--policies", "none", "--profile"], "--profile needs a policy"),
        (["--quantize", "int3"], "invalid choice: 'int3'"),
        (["--quantize", "int8"], "transformers cannot share quantised weights: give --against none"),
        (["--compile-times", "--no-compile"], "--compile-times needs a policy that is compiled"),
        (["--context", "0"], "argument --context: must be at least 1, got 0"),
        (["--dtype", "int3"], "dtype 'int3' is not supported"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--shape", "tiny", "--merge", "missing.json"], "missing.json"),
        (["--shape", "tiny", "--merge", __file__], "is not valid JSON"),
        (["--out", "nowhere/out.json"], "no folder nowhere for --out"),
        (["--speed"], "unrecognized arguments: --speed"),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_other_files_are_no_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[1]")
    assert bench_table.main([str(tmp_path)]) == 2
    assert "is no results file" in capsys.readouterr().err
    (tmp_path / "other.json").unlink()
    assert bench_table.main([str(tmp_path)]) == 2
    assert "no results files in" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--help"])
    assert exit_.value.code == 0
    assert "python scripts/bench.py --shape llama-3.1-8b" in capsys.readouterr().out
