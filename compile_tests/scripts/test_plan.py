"""`scripts/plan.py`: its bytes are those that are allocated, its times those of a formula that is checked."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_tests.examples import share
from inertiakv import POLICIES, Decoder, EvictionConfig, policy
from inertiakv.cache import memory as available
from inertiakv.cache.budgets import Budgets
from inertiakv.cache.slot_cache import CacheShape
from inertiakv.models import Transformer, parse_config
from inertiakv.models.config import parse_dtype
from inertiakv.scripts import plan
from inertiakv.scripts.benchmarking import results, traffic
from inertiakv.scripts.benchmarking.shapes import SHAPES, random_model, shape
from inertiakv.scripts.cli import arguments
from inertiakv.scripts.planning import check, fitting, report, speed
from inertiakv.scripts.planning.check import Measured
from inertiakv.scripts.planning.memory import Footprint, Shard, make_footprint, make_shard
from inertiakv.scripts.planning.speed import Device, Link, Machine, Shares, Step, decode_step, rehearsal

ROOT = Path(__file__).resolve().parents[2]
DEVICE, SHARES = Device("slow", "cpu", 1e9, 1e9, {}), Shares(0.8, 0.5, None, "given")
MACHINE = Machine(DEVICE, SHARES)
QUICK = ["--model", "tiny", "--device", "a100", "--context", "400", "--new-tokens", "64"]
# Of each way to evict, to spread budgets and to keep sets. Where heads share budgets, a prompt decides.
RULES = ("full", "inertiakv", "tova", "h2o", "snapkv", "pyramidkv", "streaming_llm", "random_after_prompt")
RULES += ("rehearsed",)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(shape("tiny", None), torch.float32, torch.device("cpu"))


def shard(
    name: str = "tiny", dtype: torch.dtype = torch.bfloat16, quantize: Any = None, ranks: int = 1
) -> Shard:
    return make_shard(parse_config(SHAPES[name]), dtype, quantize, ranks)


TINY, HALF = shard(dtype=torch.float32), shard(dtype=torch.float32, ranks=2)


def tiny(
    eviction: EvictionConfig | None = None, context: int = 400, new_tokens: int = 64, of: Shard = TINY
) -> Footprint:
    return make_footprint(of, context, new_tokens, eviction)


def bytes_of(module: torch.nn.Module) -> int:
    return sum(buffer.nbytes for buffer in module.buffers())


# --- what is held


@pytest.mark.parametrize("name", RULES)
def test_bytes_are_those_that_a_decoder_allocates(model: Transformer, name: str) -> None:
    context, new_tokens, rows = 400, 20, 3
    eviction = policy(name)
    footprint = tiny(eviction, context, new_tokens)
    decoder = Decoder(model, eviction, compile=False)
    decoder.prefill([[1] * context] * rows, max_new_tokens=new_tokens)
    assert decoder.cache is not None
    if eviction is None or eviction.evict_at == "first_step":
        assert bytes_of(decoder.cache) == rows * (footprint.prompt_cache or footprint.decode_cache)
    out = decoder.decode(new_tokens, eos_token_ids=())
    assert bytes_of(decoder.cache) == rows * footprint.decode_cache
    assert decoder.cache.allocated_bytes == out.stats.cache_bytes == rows * footprint.decode_kv
    assert decoder.cache.shape.slots == footprint.slots
    assert bool(footprint.prompt_cache) == out.stats.evicted
    if footprint.prompt_cache:
        assert out.stats.kept_tokens == [footprint.kept] * rows
    assert footprint.weights == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("rows", [1, 4])
def test_a_decoder_takes_what_fits_and_refuses_one_row_more(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    context, eviction = 300, EvictionConfig(compression=0.5)
    footprint = tiny(eviction, context, new_tokens=20)
    free = footprint.together(rows) - footprint.weights
    assert footprint.most_together(footprint.together(rows)) == rows
    assert footprint.most_together(footprint.together(rows) - 1) == rows - 1
    monkeypatch.setattr(available, "available_bytes", lambda device: free)
    Decoder(model, eviction, compile=False).prefill([[1] * context] * rows, max_new_tokens=20)
    with pytest.raises(MemoryError):
        Decoder(model, eviction, compile=False).prefill([[1] * context] * (rows + 1), max_new_tokens=9)


@pytest.mark.parametrize("name", [*RULES, "adakv_ea", "kvzip"])
def test_a_plan_and_a_decoder_say_the_same(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(available, "require", lambda parts, *_: asked.append(sum(parts.values())))
    decoder = Decoder(model, policy(name), compile=False)
    decoder.prefill([1] * 400, max_new_tokens=64)
    footprint = make_footprint(TINY, 400, 64, policy(name), on_cpu=True)
    most = footprint.together(1) - footprint.weights
    assert asked[0] <= most <= asked[0] + footprint.decode_cache


def test_sessions_read_one_by_one_hold_one_prompt_cache() -> None:
    one = replace(tiny(), weights=1000, prompt_cache=100, decode_cache=10, decode_kv=9, workspace=7)
    assert [one.one_by_one(rows) for rows in (0, 3)] == [1000, 1000 + 3 * 10 + 100 + 7]
    assert [one.most_one_by_one(size) for size in (0, 1116, 1117, 1200)] == [0, 0, 1, 9]
    assert one.most_together(0) == 0
    whole = replace(one, prompt_cache=0, decode_cache=100, workspace=0)
    # Ten times fewer bytes a session, and of ten times more sessions what the prompt leaves.
    assert (whole.most_one_by_one(2000), one.most_one_by_one(2000)) == (10, 89)


# --- several devices


@pytest.mark.parametrize("name", ["llama-3.3-70b", "qwen2.5-14b", "qwen3-30b-a3b", "mistral-7b-v0.3"])
def test_ranks_hold_a_part_each(name: str) -> None:
    whole, half = shard(name), shard(name, ranks=2)
    parameters = whole.model.named_parameters()
    on_both = sum(p.nbytes for path, p in parameters if "norm" in path or ".gate." in path)
    assert 2 * half.weight_bytes == whole.weight_bytes + on_both
    one, two = (tiny(EvictionConfig(), 20_000, 100, of) for of in (whole, half))
    assert (one.decode_kv, one.kept) == (2 * two.decode_kv, two.kept)


def test_fewer_kv_heads_than_ranks_are_on_several() -> None:
    four, eight = (shard("qwen3-30b-a3b", ranks=ranks).config for ranks in (4, 8))
    assert (four.num_kv_heads, four.num_heads) == (1, 8)
    assert (eight.num_kv_heads, eight.num_heads) == (1, 4)


def test_quantised_weights_take_a_byte() -> None:
    plain, small = (shard("llama-3.1-8b", quantize=quantize) for quantize in (None, "int8"))
    assert plain.active_weights == small.active_weights == 8_030_261_248 - 128256 * 4096
    assert 0.5 < small.weight_bytes / plain.weight_bytes < 0.54  # the embedding stays as it is


# --- how fast


@share(2)
@given(
    context=st.integers(100, 20_000),
    compression=st.floats(0.01, 0.98),
    more=st.floats(0.0, 0.9),
    rows=st.integers(1, 40),
    memory_bytes=st.floats(1e6, 1e10),
)
def test_more_evicted_is_never_worse(
    context: int, compression: float, more: float, rows: int, memory_bytes: float
) -> None:
    harder = compression + more * (0.99 - compression)
    less, least = (tiny(EvictionConfig(compression=share), context) for share in (compression, harder))
    assert decode_step(least, rows, MACHINE).seconds <= decode_step(less, rows, MACHINE).seconds
    assert least.decode_cache <= less.decode_cache
    assert least.kept <= less.kept
    assert least.most_one_by_one(memory_bytes) >= less.most_one_by_one(memory_bytes)
    assert least.most_together(memory_bytes) >= less.most_together(memory_bytes)
    for footprint in (less, least):
        most = footprint.most_one_by_one(memory_bytes)
        assert footprint.one_by_one(most + 1) > memory_bytes
        assert most == 0 or footprint.one_by_one(most) <= memory_bytes
        # Never ten times more sessions for ten times fewer tokens.
        assert most <= max(0, memory_bytes - footprint.weights) / footprint.decode_cache


@share(2)
@given(rows=st.integers(1, 60), context=st.integers(1, 400), gb=st.floats(0.1, 100), faster=st.floats(1, 9))
def test_more_takes_longer_and_nothing_beats_the_limit(
    rows: int, context: int, gb: float, faster: float
) -> None:
    def at(rows: int, context: int, gb: float) -> Step:
        return decode_step(tiny(None, context), rows, Machine(replace(DEVICE, bandwidth=1e9 * gb), SHARES))

    step = at(rows, context, gb)
    assert step.seconds > step.limit > 0
    assert at(rows + 1, context, gb).seconds > step.seconds
    assert at(rows, context + 200, gb).seconds >= step.seconds
    assert at(rows, context, gb * faster).seconds == pytest.approx(step.seconds / faster)


def test_parts_of_a_step() -> None:
    footprint = tiny(EvictionConfig())
    weights, kv = traffic.weight_bytes(TINY.model, 2), 2 * footprint.decode_kv
    step = decode_step(footprint, 2, MACHINE)
    assert step.parts == pytest.approx({"weights": weights / 0.8e9, "K and V": kv / 0.5e9})
    assert step.limit == pytest.approx((weights + 2 * 40 * 2 * 2 * 2 * 16 * 4) / 1e9)
    assert step.bottleneck == "weights"
    # Arithmetic takes the place of reading weights, once it takes longer.
    step = decode_step(footprint, 2, Machine(DEVICE, replace(SHARES, flops=1e6)))
    assert step.parts["arithmetic"] == pytest.approx(2 * 2 * TINY.active_weights / 1e6)
    assert step.bottleneck == "arithmetic"


@pytest.mark.parametrize(
    "name, more", [("inertiakv", 0.5), ("lazy4", 0.125), ("score_free", 0.0), ("streaming_llm", 0.0)]
)
def test_on_a_gpu_steps_that_score_read_k_again(name: str, more: float) -> None:
    footprint = tiny(POLICIES[name])
    step = decode_step(footprint, 2, Machine(replace(DEVICE, kind="cuda"), SHARES))
    assert step.parts["K and V"] == pytest.approx((1 + more) * 2 * footprint.decode_kv / 0.5e9)


def test_all_reduces_are_two_a_layer_one_of_the_embedding_and_one_of_the_scores() -> None:
    link = Link(1e9, 1e-5)
    footprint = tiny(EvictionConfig(), of=HALF)
    step = decode_step(footprint, 3, Machine(DEVICE, SHARES, link))
    hidden, scores = 3 * 64 * 4, 3 * footprint.slots * 4
    assert step.parts["all-reduce"] == pytest.approx(5 * (1e-5 + hidden / 1e9) + 1e-5 + scores / 1e9)
    assert link.all_reduce(1e9, 4) == pytest.approx(1.5 + 1e-5)


def test_a_rehearsal_is_its_steps_and_a_pass_for_each_draft() -> None:
    rule = policy("rehearsed", draft=5, drafts=3, budget=40)
    footprint = tiny(rule, new_tokens=20)
    weights = traffic.weight_bytes(TINY.model, 10) / 0.8e9
    arithmetic = 2 * TINY.active_weights * 10 / 1e6
    reading = 2 * footprint.prompt_cache / 0.5e9
    slow = Machine(replace(DEVICE, flops={4: 1e6}), SHARES)
    for machine, computing in ((MACHINE, weights), (slow, arithmetic)):
        steps = 4 * decode_step(footprint, 2, machine).seconds
        assert rehearsal(footprint, 2, machine) == pytest.approx(3 * (steps + computing + reading))
    # 3 drafts of 4 steps, the passes, and all-reduces: five a pass for hidden states, and a score a layer.
    linked = Machine(DEVICE, SHARES, Link(1e9, 1e-3))
    half = tiny(rule, new_tokens=20, of=HALF)
    assert rehearsal(half, 2, linked) > rehearsal(half, 2, MACHINE) + 3 * (4 * 5 + 5 + 2) * 1e-3
    for other in (None, EvictionConfig(), policy("rehearsed", budget=500)):
        assert rehearsal(tiny(other), 2, MACHINE) == 0


# --- against what was measured


def measurements(shares: Shares, batches: tuple[int, ...]) -> list[Measured]:
    """Steps that these shares describe exactly."""
    made = []
    for batch in batches:
        for kv in (0.001, 0.02):
            row = Measured("f", "n", "d", 9, batch, "cpu", "float32", 1.0, 0.01, kv * batch, 1e9 * batch)
            arithmetic = 0 if shares.flops is None else row.flops / shares.flops
            made.append(replace(row, seconds=max(0.01 / shares.weights, arithmetic) + row.kv / shares.kv))
    return made


@pytest.mark.parametrize(
    "batches, flops, found", [((1, 8), 2e11, 2e11), ((1,), 2e11, None), ((1, 2), 1e15, None)]
)
def test_shares_are_found_again(batches: tuple[int, ...], flops: float, found: float | None) -> None:
    """A batch that is bound by reading says nothing of arithmetic."""
    shares = check.fit(measurements(Shares(0.9, 0.4, flops, ""), batches), "here")
    assert shares is not None
    assert (shares.weights, shares.kv) == pytest.approx((0.9, 0.4))
    assert shares.flops == (None if found is None else pytest.approx(found))


def test_shares_that_cannot_be_told_apart() -> None:
    assert check.fit(measurements(SHARES, (1,))[:1] * 3, "here") is None
    assert check.fit([], "here") is None


def test_formulas_are_those_of_the_measurements() -> None:
    """Bytes a step, and slots, of every committed measurement of a policy: from its setting alone."""
    compared = 0
    for file in sorted(check.FOLDER.glob("*.json")):
        result = results.read(file)
        for contender in result["contenders"]:
            if "graphs" not in contender or result["model"]["name"] not in SHAPES:
                continue
            config = parse_config(shape(result["model"]["name"], result["model"]["layers"]))
            dtype, batch = parse_dtype(contender["dtype"]), contender["batch"]
            model = make_shard(config, dtype, result["model"]["quantize"], 1).model
            assert traffic.step_bytes(model, contender["kept_tokens_by_row"]) == contender["bytes_per_step"]
            if contender["config"] is not None and contender["start"] != "evicted cache":
                eviction = EvictionConfig(**contender["config"])
                slots = Budgets(eviction, contender["lengths"], config.num_layers).decode_slots(128)
                cache = CacheShape(config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)
                assert cache.nbytes(dtype) == contender["cache_bytes"]
                compared += 1
    assert compared >= 15


def test_other_ways_of_decoding_are_left_out(tmp_path: Path) -> None:
    result = results.read(check.FOLDER / "smollm2-135m-cpu.json")
    changes: list[dict[str, Any]] = [
        {"attention": "flex"},
        {"graphs": {"compiled": 0, "breaks": 0, "recompiles": 0}},
        {"merged_from": {"name": "other.json"}},
    ]
    ours = [contender for contender in result["contenders"] if contender["name"] == "inertiakv"][:1]
    result["contenders"] = ours + [ours[0] | change for change in changes]
    results.write(tmp_path / "here.json", result)
    assert len(check.measured([tmp_path / "here.json"])) == 1
    result["model"]["name"] = "someone's"
    results.write(tmp_path / "here.json", result)
    assert check.measured([tmp_path / "here.json"]) == []


def test_predictions_are_near_the_measurements() -> None:
    rows = check.predict(check.measured(sorted(check.FOLDER.glob("*.json"))))
    assert {row.batch for row in rows} >= {1, 8}
    assert {row.dtype for row in rows} == {"bfloat16", "float32"}
    assert not {row.name for row in rows} & {"transformers", "kvpress"}
    errors = [row.error(row.held_out) for row in rows]
    known = [abs(error) for error in errors if error is not None]
    assert len(known) >= 17
    assert max(known) < 0.145
    # Where nothing else tells the shares there is no prediction, rather than one from the row itself.
    alone = [row for row in rows if row.dtype == "float32"]
    assert all(row.held_out is None and row.predicted is not None for row in alone)


# --- the command line


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert plan.main([*argv, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_one_object_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*QUICK, "--batch", "1,3", "--ranks", "1,2", "--interconnect-gb-per-s", "10"]
    found = run(capsys, *argv)
    assert set(found) == {
        "model",
        "device",
        "shares",
        "fitting",
        "rooms",
        "steps",
        "sweep",
        "notes",
        "command",
    }
    assert found["model"] == {
        "name": "tiny",
        "dtype": "bfloat16",
        "quantize": None,
        "parameters": sum(p.numel() for p in TINY.model.parameters()),
        "weight_bytes": TINY.weight_bytes // 2,
        "kv_bytes_per_token": 2 * 2 * 2 * 16 * 2,
    }
    assert [(s["policy"], s["ranks"], s["batch"]) for s in found["steps"]] == [
        (name, ranks, batch) for ranks in (1, 2) for batch in (1, 3) for name in ("full", "inertiakv")
    ]
    for step in found["steps"]:
        assert step["ms"] == pytest.approx(sum(step["parts_ms"].values()))
        assert step["tokens_per_second"] == pytest.approx(1000 * step["batch"] / step["ms"])
        assert ("all-reduce" in step["parts_ms"]) == (step["ranks"] == 2)
        assert step["fits"] == "together"
        assert step["limit_ms"] < step["ms"]
    for footprint in found["rooms"]:
        assert footprint["sessions"] >= footprint["largest_batch"] > 0
        assert (footprint["bytes_a_row"]["prompt_cache"] > 0) == (footprint["policy"] != "full")
    assert all(0 <= point["compression"] < 1 for point in found["sweep"])


def test_a_rehearsal_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rehearsed", "inertiakv"):
        found = run(capsys, *QUICK, "--policy", name)
        times = {step["policy"]: step["rehearsal_ms"] for step in found["steps"]}
        assert times["full"] == 0
        assert (times[name] > 0) == (name == "rehearsed")
        assert ("rehearsal ms" in report.speed_table(found).head) == (name == "rehearsed")
        assert any("rehearsal" in note for note in found["notes"]) == (name == "rehearsed")


def test_a_budget_that_evicts_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*QUICK[:4], "--context", "100,300,400", "--new-tokens", "9", "--budget", "300"]
    told = [note for note in run(capsys, *argv)["notes"] if "budget of 300" in note]
    assert [note.rpartition(" ")[2] for note in told] == ["100", "300"]


def test_tables_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = [*QUICK, "--out", str(tmp_path / "plan.md"), "--plot", str(tmp_path / "plan.png")]
    found = run(capsys, *argv)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    text, page = report.text(found), (tmp_path / "plan.md").read_text()
    assert "(plan.png)" in page
    cells = [f"{step['ms']:.2f}" for step in found["steps"]]
    cells += [f"{footprint['sessions']:,}" for footprint in found["rooms"]]
    for cell in cells:
        assert f" {cell} " in text
        assert f"| {cell} |" in page
    assert plan.main(QUICK) == 0
    out = capsys.readouterr().out
    assert out.startswith("It fits: 1 row of 400 tokens take")
    assert "\n\ntiny, bfloat16: " in out
    assert fitting.sentences(found)[0] in page


@pytest.mark.parametrize("fits", ["together", "one by one", "no"])
def test_memory_decides_what_fits(capsys: pytest.CaptureFixture[str], fits: str) -> None:
    footprint = tiny(EvictionConfig(), of=shard())
    sizes = {"together": footprint.together(4), "one by one": footprint.one_by_one(4)}
    size = sizes.get(fits, footprint.one_by_one(4) - 1000)
    device = ["--memory-gb", str(size / 1e9 + 1e-9), "--bandwidth-gb-per-s", "1", "--usable", "1"]
    found = run(capsys, *QUICK[:2], *QUICK[4:], *device, "--batch", "4")
    assert found["steps"][1]["fits"] == fits


def test_this_machine_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed.machine, "measure_read", lambda device: 5e9)
    monkeypatch.setattr(speed.memory, "available_bytes", lambda device: 3_000_000_000)
    found = run(capsys, "--share", "0.5")
    assert found["model"]["name"] == "smollm2-135m"
    assert (found["device"]["memory_bytes"], found["device"]["bytes_per_second"]) == (3e9, 5e9)
    weights = 2 * 134_515_008 / 2.5e9
    assert found["steps"][0]["parts_ms"]["weights"] == pytest.approx(1000 * weights)


def test_a_folder_is_read_by_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = [*QUICK[2:], "--model", str(tmp_path), "--dtype", "float32"]
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    assert run(capsys, *argv)["model"]["weight_bytes"] == TINY.weight_bytes
    (tmp_path / "config.json").write_text("{")
    assert plan.main(argv) == 2
    assert "config.json is not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--model llama-9", "no model 'llama-9': no such folder"),
        ("--context 500 --new-tokens 13", "500 tokens and 13 new ones exceed"),
        ("--policy rehearsed --context 448 --new-tokens 64", "448 tokens and 65 for a draft exceed"),
        ("--device tpu", "unknown device 'tpu'; choose from this, h200, h100, a100, rtx-4090"),
        ("--memory-gb 80", "needs both --memory-gb and --bandwidth-gb-per-s"),
        ("--device h100 --memory-gb 80", "--device h100 has a memory and bandwidth of its own"),
        ("--memory-gb -1 --bandwidth-gb-per-s 9", "--memory-gb must be above 0 and at most 1e+15, got -1"),
        ("--memory-gb 1 --bandwidth-gb-per-s nan", "--bandwidth-gb-per-s must be above 0"),
        ("--memory-gb 1e300 --bandwidth-gb-per-s 1e300", "at most 1e+15, got 1e+300"),
        ("--batch 0", "argument --batch: must be at least 1, got 0"),
        ("--batch two", "argument --batch: expected N,..., got 'two'"),
        ("--new-tokens 0", "argument --new-tokens: must be at least 1, got 0"),
        ("--usable 1.5", "--usable must be above 0 and at most 1, got 1.5"),
        ("--share 0", "--share must be above 0 and at most 1, got 0"),
        ("--policy greedy", "unknown policy 'greedy'; choose from full"),
        ("--policy full --budget 9", "has no effect with policy 'full'"),
        ("--compression 1", "compression must be a number in [0, 1), got 1.0"),
        ("--compression 0.5 --budget 9", "give compression (0.5) or budget (9), not both"),
        ("--ranks 3", "3 ranks: 4 attention heads are no multiple of that"),
        ("--model qwen2.5-7b --ranks 14", "14 ranks: a vocabulary of 152064 is no multiple of that"),
        ("--ranks 1,2 --policy adakv", "compares all heads: not with the model on 2 ranks"),
        ("--interconnect-gb-per-s 9", "--interconnect-gb-per-s has no effect with one rank"),
        ("--model tiny-moe --quantize int8", "the experts of a mixture"),
        ("--policy full --plot p.png", "policy 'full' evicts nothing"),
        ("--out nowhere/plan.md", "--out nowhere/plan.md is no file in a folder that is there"),
        ("--quantize int3", "int3"),
    ],
)
def test_errors_are_one_line(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = argv.split()
    plain = {"--model": "tiny", "--device": "a100", "--context": "300"}
    if "--memory-gb" in words:
        del plain["--device"]
    words += [word for option in plain if option not in words for word in (option, plain[option])]
    assert plan.main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.slow
def test_the_page_on_the_largest_backbone_is_what_its_command_gives() -> None:
    """Run that command again where it is not."""
    page = (ROOT / "benchmarks" / "llama-3.3-70b-plan.md").read_text()
    command = page.split("`")[1]
    asked = arguments.parse(plan.Arguments, shlex.split(command)[2:], "", "plan.py")
    assert {1, 64} <= set(asked.batch)
    assert asked.ranks == [2, 4]
    assert report.page(plan.make(asked), "llama-3.3-70b-plan.png") == page
