"""`scripts/plan.py`: its bytes are those that are allocated, its times those of a formula that is checked."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inertiakv import POLICIES, Decoder, EvictionConfig, policy
from inertiakv.cache import memory
from inertiakv.cache.budgets import Budgets
from inertiakv.cache.slot_cache import CacheShape
from inertiakv.decoding.buffers import Buffers
from inertiakv.models import Transformer, parse_config
from inertiakv.models.config import parse_dtype
from inertiakv.scripts import plan
from inertiakv.scripts.benchmarking import results, traffic
from inertiakv.scripts.benchmarking.shapes import SHAPES, random_model, shape
from inertiakv.scripts.cli import arguments
from inertiakv.scripts.planning import check, devices, speed, tables
from inertiakv.scripts.planning.devices import Device
from inertiakv.scripts.planning.rank import Rank, rank_of
from inertiakv.scripts.planning.room import Request, Room, room_for
from inertiakv.scripts.planning.speed import Link, Sample, Shares

ROOT = Path(__file__).resolve().parents[1]
TINY, CHUNK = parse_config(SHAPES["tiny"]), 2048
DEVICE = Device("slow", "cpu", 1e9, 1e9, {})
SHARES = Shares(0.8, 0.5, None, "given")
QUICK = ["--model", "tiny", "--device", "a100", "--context", "400", "--new-tokens", "64"]
# Of each way to evict, to spread budgets and to keep tables. Where heads share budgets, a prompt decides.
RULES = ("full", "inertiakv", "tova", "h2o", "snapkv", "pyramidkv", "streaming_llm", "random_after_prompt")
RULES += ("rehearsed",)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(shape("tiny", None), torch.float32, torch.device("cpu"))


def tiny_rank(ranks: int = 1) -> Rank:
    return rank_of(TINY, torch.float32, None, ranks)


def bytes_of(module: torch.nn.Module) -> int:
    return sum(buffer.nbytes for buffer in module.buffers())


# --- what is held


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rows", [1, 3])
def test_bytes_are_those_that_a_decoder_allocates(model: Transformer, name: str, rows: int) -> None:
    context, new_tokens = 400, 20
    eviction = policy(name)
    room = room_for(tiny_rank(), Request(context, new_tokens, eviction), CHUNK)
    decoder = Decoder(model, eviction, compile=False)
    decoder.prefill([[1] * context] * rows, max_new_tokens=new_tokens)
    assert decoder.cache is not None
    at_first = bytes_of(decoder.cache)
    if eviction is None or eviction.evict_at == "first_step":
        assert at_first == rows * (room.prompt or room.decode)
    out = decoder.decode(new_tokens, eos_token_ids=())
    assert bytes_of(decoder.cache) == rows * room.decode
    assert decoder.cache.allocated_bytes == out.stats.cache_bytes == rows * room.decode_kv
    assert decoder.cache.shape.slots == room.slots
    assert bool(room.prompt) == out.stats.evicted
    if room.prompt:
        assert out.stats.kept_tokens == [room.kept] * rows
    assert room.weights == sum(parameter.nbytes for parameter in model.parameters())


def test_a_decoder_takes_what_fits_and_refuses_one_row_more(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, new_tokens, eviction = 300, 20, EvictionConfig(compression=0.5)
    room = room_for(tiny_rank(), Request(context, new_tokens, eviction), CHUNK)
    for rows in (1, 4):
        free = room.together(rows) - room.weights
        assert room.most_together(room.together(rows)) == rows
        assert room.most_together(room.together(rows) - 1) == rows - 1
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free)
        decoder = Decoder(model, eviction, compile=False)
        decoder.prefill([[1] * context] * rows, max_new_tokens=new_tokens)
        with pytest.raises(MemoryError):
            Decoder(model, eviction, compile=False).prefill([[1] * context] * (rows + 1), max_new_tokens=9)


def test_sessions_read_one_by_one_need_room_for_one_prompt() -> None:
    room = Room(weights=1000, prompt=100, decode=10, decode_kv=9, workspace=7, kept=5, slots=8)
    assert room.one_by_one(0) == 1000
    assert room.one_by_one(3) == 1000 + 3 * 10 + 100 + 7
    assert room.most_one_by_one(1117) == 1
    assert room.most_one_by_one(1116) == 0
    assert room.most_one_by_one(0) == room.most_together(0) == 0
    assert room.most_one_by_one(1200) == 9
    whole = dataclasses.replace(room, prompt=0, decode=100, workspace=0)
    # Ten times fewer bytes a session, and of ten times more sessions what the prompt leaves.
    assert (whole.most_one_by_one(2000), room.most_one_by_one(2000)) == (10, 89)


def test_a_rehearsal_is_its_steps_and_a_pass_for_each_draft() -> None:
    rank, rule = tiny_rank(), policy("rehearsed", draft=5, drafts=3, budget=40)
    request = Request(400, 20, rule)
    room = room_for(rank, request, CHUNK)
    where = (rank, room, request, 2, DEVICE, SHARES, None)
    weights = traffic.weight_bytes(rank.model, 10) / 0.8e9
    scoring = weights + 2 * room.prompt / 0.5e9
    assert speed.rehearsal(*where) == pytest.approx(3 * (4 * speed.step(*where).seconds + scoring))
    fast = dataclasses.replace(DEVICE, flops={4: 1e6})  # whose arithmetic is what takes time
    scoring += 2 * rank.active * 10 / 1e6 - weights
    where = (rank, room, request, 2, fast, SHARES, None)
    assert speed.rehearsal(*where) == pytest.approx(3 * (4 * speed.step(*where).seconds + scoring))
    linked = (tiny_rank(2), room, request, 2, DEVICE, SHARES, Link(1e9, 1e-3))
    unlinked = (*linked[:-1], None)
    # 3 drafts of 4 steps, the passes, and all-reduces: five a pass for hidden states, and a score a layer.
    least = 3 * (4 * 5 + 5 + 2) * 1e-3
    assert speed.rehearsal(*linked) > speed.rehearsal(*unlinked) + least
    whole = Request(400, 20, policy("rehearsed", budget=500))
    others = (Request(400, 20, None), Request(400, 20, EvictionConfig()), whole)
    for other in others:
        assert speed.rehearsal(rank, room_for(rank, other, CHUNK), other, 2, DEVICE, SHARES, None) == 0


# --- several devices


@pytest.mark.parametrize("name", ["llama-3.3-70b", "qwen2.5-14b", "qwen3-30b-a3b", "mistral-7b-v0.3"])
def test_ranks_hold_a_part_each(name: str) -> None:
    config = parse_config(SHAPES[name])
    whole, half = (rank_of(config, torch.bfloat16, None, ranks) for ranks in (1, 2))
    again = 0  # on both ranks
    for path, parameter in whole.model.named_parameters():
        again += parameter.nbytes * ("norm" in path or ".gate." in path)
    assert 2 * half.weights == whole.weights + again
    request = Request(20_000, 100, EvictionConfig())
    one, two = (room_for(rank, request, CHUNK) for rank in (whole, half))
    assert one.decode_kv == 2 * two.decode_kv
    assert one.kept == two.kept


def test_fewer_kv_heads_than_ranks_are_on_several() -> None:
    config = parse_config(SHAPES["qwen3-30b-a3b"])  # four of them
    four, eight = (rank_of(config, torch.bfloat16, None, ranks) for ranks in (4, 8))
    assert four.config.num_kv_heads == eight.config.num_kv_heads == 1
    assert (four.config.num_heads, eight.config.num_heads) == (8, 4)


@pytest.mark.parametrize(
    "name, ranks, message",
    [
        ("llama-3.3-70b", 3, "3 ranks: 64 attention heads are no multiple of that"),
        ("qwen2.5-7b", 14, "14 ranks: a vocabulary of 152064 is no multiple of that"),
        ("mistral-7b-v0.3", 64, "64 ranks: 32 attention heads are no multiple"),
    ],
)
def test_what_cannot_be_split(name: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_of(parse_config(SHAPES[name]), torch.bfloat16, None, ranks)


def test_quantised_weights_take_a_byte() -> None:
    config = parse_config(SHAPES["llama-3.1-8b"])
    plain, small = (rank_of(config, torch.bfloat16, quantize, 1) for quantize in (None, "int8"))
    assert plain.active == small.active == 8_030_261_248 - 128256 * 4096
    assert 0.5 < small.weights / plain.weights < 0.54  # the embedding stays as it is


# --- how fast


@settings(max_examples=25)
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
    rank = tiny_rank()
    harder = compression + more * (0.99 - compression)

    def at(compression: float) -> tuple[Room, float]:
        request = Request(context, 64, EvictionConfig(compression=compression))
        room = room_for(rank, request, CHUNK)
        return room, speed.step(rank, room, request, rows, DEVICE, SHARES, None).seconds

    (less, slow), (least, fast) = at(compression), at(harder)
    assert fast <= slow
    assert least.decode <= less.decode
    assert least.kept <= less.kept
    assert least.most_one_by_one(memory_bytes) >= less.most_one_by_one(memory_bytes)
    assert least.most_together(memory_bytes) >= less.most_together(memory_bytes)
    for room in (less, least):
        most = room.most_one_by_one(memory_bytes)
        assert room.one_by_one(most + 1) > memory_bytes
        assert most == 0 or room.one_by_one(most) <= memory_bytes
        # Never ten times more sessions for ten times fewer tokens.
        assert most <= max(0, memory_bytes - room.weights) / room.decode


@settings(max_examples=25)
@given(rows=st.integers(1, 60), context=st.integers(1, 400), gb=st.floats(0.1, 100), faster=st.floats(1, 9))
def test_more_takes_longer_and_nothing_beats_the_limit(
    rows: int, context: int, gb: float, faster: float
) -> None:
    rank = tiny_rank()

    def at(rows: int, context: int, gb: float) -> speed.Step:
        request = Request(context, 64, None)
        device = dataclasses.replace(DEVICE, bandwidth=1e9 * gb)
        return speed.step(rank, room_for(rank, request, CHUNK), request, rows, device, SHARES, None)

    step = at(rows, context, gb)
    assert step.seconds > step.limit > 0
    assert at(rows + 1, context, gb).seconds > step.seconds
    assert at(rows, context + 200, gb).seconds >= step.seconds
    assert at(rows, context, gb * faster).seconds == pytest.approx(step.seconds / faster)


def test_parts_of_a_step() -> None:
    rank, request = tiny_rank(), Request(400, 64, EvictionConfig())
    room = room_for(rank, request, CHUNK)
    weights, kv = traffic.weight_bytes(rank.model, 2), 2 * room.decode_kv
    step = speed.step(rank, room, request, 2, DEVICE, SHARES, None)
    assert step.parts == pytest.approx({"weights": weights / 0.8e9, "K and V": kv / 0.5e9})
    assert step.limit == pytest.approx((weights + 2 * 40 * 2 * 2 * 2 * 16 * 4) / 1e9)
    assert step.bottleneck == "weights"
    # Arithmetic takes the place of reading weights, once it takes longer.
    slow = dataclasses.replace(SHARES, flops=1e6)
    step = speed.step(rank, room, request, 2, DEVICE, slow, None)
    assert step.parts["arithmetic"] == pytest.approx(2 * 2 * rank.active / 1e6)
    assert step.bottleneck == "arithmetic"
    # On a GPU scoring reads K again, at the steps that score.
    gpu = dataclasses.replace(DEVICE, kind="cuda")
    for name, more in (("inertiakv", 0.5), ("lazy4", 0.125), ("score_free", 0.0), ("streaming_llm", 0.0)):
        asked = dataclasses.replace(request, eviction=POLICIES[name])
        assert speed.step(rank, room, asked, 2, gpu, SHARES, None).parts["K and V"] == pytest.approx(
            (1 + more) * kv / 0.5e9
        )


def test_all_reduces_are_two_a_layer_one_of_the_embedding_and_one_of_the_scores() -> None:
    rank, request, link = tiny_rank(2), Request(400, 64, EvictionConfig()), Link(1e9, 1e-5)
    room = room_for(rank, request, CHUNK)
    step = speed.step(rank, room, request, 3, DEVICE, SHARES, link)
    hidden, scores = 3 * 64 * 4, 3 * room.slots * 4
    assert step.parts["all-reduce"] == pytest.approx(5 * (1e-5 + hidden / 1e9) + 1e-5 + scores / 1e9)
    assert link.all_reduce(1e9, 4) == pytest.approx(1.5 + 1e-5)


def samples(shares: Shares, batches: tuple[int, ...]) -> list[Sample]:
    made = []
    for batch in batches:
        for kv in (0.001, 0.02):
            sample = Sample("cpu", "float32", batch, 1.0, 0.01, kv * batch, 1e9 * batch)
            made.append(dataclasses.replace(sample, seconds=shares.seconds(sample)))
    return made


def test_shares_are_found_again() -> None:
    truth = Shares(0.9, 0.4, 2e11, "")
    found = speed.fit(samples(truth, (1, 8)), "here")
    assert found is not None
    assert (found.weights, found.kv, found.flops) == pytest.approx((0.9, 0.4, 2e11))
    single = speed.fit(samples(truth, (1,)), "here")
    assert single is not None
    assert single.flops is None
    # A batch that is bound by reading says nothing of arithmetic.
    fast = speed.fit(samples(Shares(0.9, 0.4, 1e15, ""), (1, 2)), "here")
    assert fast is not None
    assert fast.flops is None
    assert speed.fit(samples(truth, (1,))[:1] * 3, "here") is None
    assert speed.fit([], "here") is None


# --- against what was measured


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
            kept = contender["kept_tokens_by_row"]
            rank = rank_of(config, dtype, result["model"]["quantize"], 1)
            assert traffic.step_bytes(rank.model, kept) == contender["bytes_per_step"]
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
    errors = [check.error(row.held_out, row.ms) for row in rows]
    known = [abs(error) for error in errors if error is not None]
    assert len(known) >= 17
    assert max(known) < 0.2
    assert f"Predictions are within {100 * max(known):.0f} % of" in (ROOT / "README.md").read_text()
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
    keys = {"model", "device", "shares", "rooms", "steps", "sweep", "notes", "command"}
    assert set(found) == keys
    assert found["model"] == {
        "name": "tiny",
        "dtype": "bfloat16",
        "quantize": None,
        "parameters": sum(p.numel() for p in tiny_rank().model.parameters()),
        "weight_bytes": tiny_rank().weights // 2,
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
    for room in found["rooms"]:
        assert room["sessions"] >= room["largest_batch"] > 0
        assert (room["bytes_a_row"]["prompt_cache"] > 0) == (room["policy"] != "full")
    assert all(0 <= point["compression"] < 1 for point in found["sweep"])
    assert "another kind of device" in " ".join(found["notes"]) or found["shares"]["source"].endswith("cuda")


def test_a_rehearsal_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*QUICK, "--policy", "rehearsed"]
    found = run(capsys, *argv)
    times = {step["policy"]: step["rehearsal_ms"] for step in found["steps"]}
    assert times["full"] == 0 < times["rehearsed"]
    assert plan.main(argv) == 0
    text = capsys.readouterr().out
    assert "note: rehearsal ms: 2 drafts of 64 tokens before an answer's second token" in text
    assert f"{times['rehearsed']:,.2f}  " in text
    assert "rehearsal ms" in tables.steps({"steps": found["steps"]}).head
    assert plan.main(QUICK) == 0
    assert "rehearsal" not in capsys.readouterr().out
    assert plan.main([*QUICK[:4], "--policy", "rehearsed", "--context", "448", "--new-tokens", "64"]) == 2
    assert "448 tokens and 65 for a draft exceed the model's 512 positions" in capsys.readouterr().err


def test_a_budget_that_evicts_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    notes = run(capsys, *QUICK[:4], "--context", "100,300,400", "--new-tokens", "9", "--budget", "300")[
        "notes"
    ]
    told = [f"a budget of 300 tokens evicts nothing of a context of {context}" for context in (100, 300)]
    assert [note for note in notes if "budget" in note] == told


def test_tables_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run(capsys, *QUICK, "--budget", "50", "--out", str(tmp_path / "plan.md"))
    assert plan.main([*QUICK, "--budget", "50"]) == 0
    text, page = capsys.readouterr().out, (tmp_path / "plan.md").read_text()
    for step in found["steps"]:
        assert f"{step['ms']:.2f}" in text
        assert f"| {step['ms']:.2f} |" in page
    for room in found["rooms"]:
        assert f" {room['sessions']:,} " in text
        assert f"| {room['sessions']:,} |" in page
    assert found["command"] in page
    assert "times fewer tokens are" in text


def test_memory_decides_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--model", "tiny", "--context", "400", "--new-tokens", "64", "--bandwidth-gb-per-s", "1"]
    rank = rank_of(TINY, torch.bfloat16, None, 1)
    room = room_for(rank, Request(400, 64, EvictionConfig()), CHUNK)
    sizes = {"together": room.together(4), "one by one": room.one_by_one(4), "no": room.one_by_one(4) - 1000}
    for fits, size in sizes.items():
        found = run(capsys, *base, "--memory-gb", str(size / 1e9 + 1e-9), "--usable", "1", "--batch", "4")
        assert found["steps"][1]["fits"] == fits


def test_this_machine_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.machine, "measure_read", lambda device: 5e9)
    monkeypatch.setattr(devices.memory, "available_bytes", lambda device: 3_000_000_000)
    found = run(capsys, "--share", "0.5")
    assert found["model"]["name"] == "smollm2-135m"
    assert (found["device"]["memory_bytes"], found["device"]["bytes_per_second"]) == (3e9, 5e9)
    full = found["steps"][0]
    weights = 2 * 134_515_008 / 2.5e9
    assert full["parts_ms"]["weights"] == pytest.approx(1000 * weights)


def test_a_folder_is_read_by_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    found = run(capsys, *QUICK[2:], "--model", str(tmp_path), "--dtype", "float32")
    assert found["model"]["weight_bytes"] == tiny_rank().weights
    (tmp_path / "config.json").write_text("{")
    assert plan.main([*QUICK[2:], "--model", str(tmp_path)]) == 2
    assert "config.json is not valid JSON" in capsys.readouterr().err


def test_predictions_beside_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(check.FOLDER / "smollm2-135m-cpu.json")
    rows = run(capsys, "--check", file)
    assert [row["name"] for row in rows] == ["full", "inertiakv", "lazy4", "score_free"] * 2
    assert all(row["error"] == pytest.approx(row["predicted"] / row["ms"] - 1) for row in rows)
    assert plan.main(["--check", file]) == 0
    assert f"{rows[0]['ms']:.2f}" in capsys.readouterr().out


def test_chart_of_compressions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert plan.main([*QUICK, "--plot", str(tmp_path / "p.png"), "--out", str(tmp_path / "p.md")]) == 0
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert "(p.png)" in (tmp_path / "p.md").read_text()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--model", "llama-9"], "no model 'llama-9': no such folder"),
        (["--model", "tiny", "--context", "500", "--new-tokens", "13"], "500 tokens and 13 new ones exceed"),
        (["--device", "tpu"], "unknown device 'tpu'; choose from this, h200, h100, a100, rtx-4090"),
        (["--memory-gb", "80"], "needs both --memory-gb and --bandwidth-gb-per-s"),
        (["--device", "h100", "--memory-gb", "80"], "--device h100 has a memory and bandwidth of its own"),
        (["--memory-gb", "-1", "--bandwidth-gb-per-s", "9"], "--memory-gb must be a number above 0, got -1"),
        (
            ["--memory-gb", "1", "--bandwidth-gb-per-s", "nan"],
            "--bandwidth-gb-per-s must be a number above 0",
        ),
        (["--batch", "0"], "--batch must be a number above 0, got 0"),
        (["--batch", "two"], "--batch takes numbers joined by commas, got 'two'"),
        (["--new-tokens", "0"], "--new-tokens must be a number above 0, got 0"),
        (["--usable", "1.5"], "--usable must be above 0 and at most 1, got 1.5"),
        (["--share", "0"], "--share must be above 0 and at most 1, got 0"),
        (["--policy", "greedy"], "unknown policy 'greedy'; choose from full"),
        (["--policy", "full", "--budget", "9"], "has no effect with policy 'full'"),
        (["--compression", "1"], "compression must be a number in [0, 1), got 1.0"),
        (["--compression", "0.5", "--budget", "9"], "give compression (0.5) or budget (9), not both"),
        (["--ranks", "3"], "3 ranks: 4 attention heads are no multiple of that"),
        (["--ranks", "1,2", "--policy", "adakv"], "compares all heads: not with the model on 2 ranks"),
        (["--memory-gb", "1e300", "--bandwidth-gb-per-s", "1e300"], "got 1e+300 (and below 1e15)"),
        (["--interconnect-gb-per-s", "9"], "--interconnect-gb-per-s has no effect with one rank"),
        (["--all-reduce-us", "5"], "--all-reduce-us has no effect without --interconnect-gb-per-s"),
        (["--model", "tiny-moe", "--quantize", "int8"], "the experts of a mixture are not quantised"),
        (["--policy", "full", "--plot", "p.png"], "policy 'full' evicts nothing"),
        (["--out", "nowhere/plan.md"], "--out nowhere/plan.md is no file in a folder that is there"),
        (["--check", "missing.json"], "missing.json"),
        (["--check", "missing.json", "--batch", "2"], "--check plans nothing: --json alone goes with it"),
        (["--quantize", "int3"], "int3"),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--check" not in argv:
        plain = {"--model": "tiny", "--device": "a100", "--context": "300"}
        plain = {option: value for option, value in plain.items() if option not in argv}
        if "--memory-gb" in argv:
            plain.pop("--device", None)
        argv = [*(word for pair in plain.items() for word in pair), *argv]
    assert plan.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    assert "python scripts/plan.py --model llama-3.3-70b --device h200 --ranks 2,4" in capsys.readouterr().out


def test_the_page_on_the_largest_backbone_is_what_its_command_gives() -> None:
    """Run that command again where it is not."""
    page = (ROOT / "benchmarks" / "llama-3.3-70b-plan.md").read_text()
    command = page.split("`")[1]
    argv = shlex.split(command)[2:]
    args = arguments.parse(plan.Arguments, argv, "")
    asked = plan.make(args)
    assert {1, 64} <= set(asked.batches)
    assert list(asked.ranks) == [2, 4]
    found = {**asked.as_json(), "notes": plan.notes(asked), "command": command}
    assert tables.page(found, "llama-3.3-70b-plan.png") == page


def test_prefill_workspace_is_the_decoders(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, int] = {}
    monkeypatch.setattr(memory, "require", lambda asked, *_: parts.update(asked))
    Buffers(model).require(3, 0, 128, 200)
    room = room_for(tiny_rank(), Request(200, 5, None), CHUNK)
    assert parts["prefill"] == 3 * room.workspace
