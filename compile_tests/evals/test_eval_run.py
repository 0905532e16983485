"""Rules, records and the run itself, on a tiny random model and benchmarks that take no time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_tests.evals.fake_benchmarks import NEW_TOKENS, FakeDataTask, FakeTask, letters
from compile_tests.evals.results import make_record
from compile_tests.examples import share
from compile_tests.tiny_chat import set_eos, tiny_chat
from inertiakv import Decoder, EvictionConfig, policy
from inertiakv.cache import memory
from inertiakv.evals.records import SECONDS, Mean, Record, RecordFile, means, read_records
from inertiakv.evals.rules import Rule, choose_rules, label, parse_policy
from inertiakv.evals.run import Evaluation, Group, count, make_groups
from inertiakv.evals.task import Prompting, prompt_hash
from inertiakv.models import load_model
from inertiakv.models.encoding import encode_chat

POLICIES = ["full", "inertiakv", "lazy4:pool=5", "snapkv:window=8:recent=8", "kvzip"]
"""One of each kind: evicted in the first step, before it, and by a second reading of the prompt."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Prompting]:
    folder = tiny_chat(tmp_path_factory.mktemp("model"), max_positions=512)
    model, tokenizer = load_model(str(folder), dtype="float64", device="cpu")
    return model, Prompting(tokenizer, "chat")


def evaluation(loaded: tuple[Any, Prompting], rules: Sequence[Rule], **options: Any) -> Evaluation:
    return Evaluation(*loaded, rules, **{"compile": False} | options)


def made(loaded: tuple[Any, Prompting], name: str = "made:short", seed: int = 0) -> FakeTask:
    return FakeTask(name, loaded[1], seed)


def some_rules(*policies: str, compression: float = 0.75) -> list[Rule]:
    return choose_rules(policies or POLICIES, [] if policies == ("full",) else [compression], [])


def by_key(records: Sequence[Record]) -> dict[Any, dict[str, Any]]:
    """Records without what depends on the machine and on a batch's other rows."""
    unlike = dict.fromkeys(("seconds", "cache_bytes"))
    assert len({record.key for record in records}) == len(records)
    return {record.key: dataclasses.asdict(record) | unlike for record in records}


# Rules
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, changes",
    [
        ("lazy4:pool=13", {"pool": 13}),
        ("inertiakv:alpha=0.3:sinks=4", {"alpha": 0.3, "sinks": 4}),
        ("inertiakv:alpha=0", {"alpha": 0.0}),
        ("inertiakv:refresh=once", {"refresh": "once"}),
        ("inertiakv:refresh=3", {"refresh": 3}),
        ("inertiakv:recent=0.5", {"recent": 0.5}),
        ("inertiakv:recent=5", {"recent": 5}),
        ("inertiakv:layers=0+2", {"layers": (0, 2)}),
        ("inertiakv:protect_prompt=true", {"protect_prompt": True}),
        ("random:scorer_seed=7", {"scorer_seed": 7}),
        ("inertiakv:coupling=temporal", {"coupling": "temporal"}),
    ],
)
def test_policies_as_a_command_line_writes_them(text: str, changes: dict[str, Any]) -> None:
    name = text.partition(":")[0]
    assert parse_policy(text) == (name, changes)
    assert [type(value) for value in parse_policy(text)[1].values()] == list(map(type, changes.values()))
    (rule,) = choose_rules([text], [0.5], [])
    assert rule == Rule(text, 0.5, None, policy(name, compression=0.5, **changes))


@pytest.mark.parametrize(
    "policies, message",
    [
        ("best", "unknown policy 'best'; choose from full, inertiakv"),
        ("", "unknown policy ''"),
        ("lazy4:pol=13", "unknown field in lazy4:pol=13: 'pol'; choose from compression"),
        ("lazy4:pool", "lazy4:pool: 'pool' is no field=value"),
        ("lazy4:pool=13:pool=5", "lazy4:pool=13:pool=5: pool is given twice"),
        ("lazy4:pool=wide", "lazy4:pool=wide: pool must be a whole number of at least 1, got 'wide'"),
        ("lazy4:pool=1.5", "pool must be a whole number of at least 1, got '1.5'"),
        ("lazy4:pool=4", "lazy4:pool=4: pool must be an odd number of positions, got 4"),
        ("lazy4:alpha=", "alpha must be a number in [0, 1), got ''"),
        ("lazy4:alpha=nan", "alpha must be a number in [0, 1), got nan"),
        ("lazy4:refresh=never", "refresh must be a whole number of at least 1 or 'once', got 'never'"),
        ("lazy4:protect_prompt=1", "protect_prompt must be true or false, got '1'"),
        ("lazy4:layers=0;1", "layers must be a tuple of layers, got '0;1'"),
        ("lazy4:coupling=loose", "unknown coupling 'loose'; choose from layer_temporal, temporal, layer"),
        ("lazy4:budget=9", "lazy4:budget=9: budget holds for all policies: give --budget"),
        ("single:alpha=0.5", "single:alpha=0.5: alpha=0.5 has no effect with aggregation='single'"),
        ("full:alpha=0.5", "full:alpha=0.5: alpha has no effect with policy 'full'"),
        ("full full", "full and full are the same rule"),
        ("inertiakv:layers=0+1 inertiakv:layers=1+0", "inertiakv:layers=1+0@0.5 are the same rule"),
        ("inertiakv inertiakv:alpha=0.8", "inertiakv@0.5 and inertiakv:alpha=0.8@0.5 are the same rule"),
    ],
)
def test_what_is_no_policy(policies: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_rules(policies.split(" "), [] if "full" in policies else [0.5], [])


def test_every_policy_at_every_compression_or_budget_and_full_once() -> None:
    rules = choose_rules(["full", "inertiakv", "lazy4"], [0.9, 0.5], [])
    assert list(map(str, rules)) == ["full", "inertiakv@0.9", "inertiakv@0.5", "lazy4@0.9", "lazy4@0.5"]
    assert [rule.eviction for rule in rules[:2]] == [None, EvictionConfig(compression=0.9)]
    rules = choose_rules(["full", "lazy4"], [], [64, 128])
    assert [rule.key for rule in rules] == [
        ("full", None, None),
        ("lazy4", None, 64),
        ("lazy4", None, 128),
    ]
    assert rules[2].eviction == EvictionConfig(budget=128, refresh=4)
    assert [rule.compression for rule in choose_rules(["lazy4"], [], [])] == [0.9]


def test_sizes_that_cannot_be() -> None:
    for sizes, message in (
        (([0.5], [9]), "give compressions or budgets, not both"),
        (([1.5], []), "snapkv: compression must be a number in [0, 1), got 1.5"),
        (([], [0]), "snapkv: budget must be a whole number of at least 1, got 0"),
        (([], [16]), "snapkv: recent (32) protect more tokens than the budget of 16 keeps"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            choose_rules(["full", "snapkv"], *sizes)
    with pytest.raises(ValueError, match="no effect on 'full'"):
        choose_rules(["full"], [0.5], [])


# Records
# ----------------------------------------------------------------------------------------------------------


def record(index: int = 0, **changes: Any) -> Record:
    fields = {"task": "made:short", "length": 100, "index": index, "policy": "inertiakv:alpha=0.3"}
    fields |= {"prediction": "two\nlines \u2028 \ud800 \N{PILE OF POO}", "score": 0.1, "facts": {"depth": 50}}
    return make_record(**fields | changes)


def write(path: Path, *records: Record) -> None:
    file = RecordFile(path)
    for one in records:
        file.append(one)
    file.close()


def test_records_come_back_from_all_files_as_they_were(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    write(tmp_path / "records-0.jsonl", record(0), record(2))
    write(tmp_path / "records-1.jsonl", record(1))
    write(tmp_path / "records-1.jsonl", record(3))
    assert read_records(tmp_path) == [record(0), record(2), record(1), record(3)]


def test_a_record_is_on_the_disk_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    path = tmp_path / "records.jsonl"
    monkeypatch.setattr("os.fsync", lambda _: sizes.append(path.read_bytes().count(b"\n")))
    write(path, record(0), record(1), record(2))
    assert sizes == [1, 2, 3]


def test_half_a_record_is_none_and_makes_place(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, record(0), record(1))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in (first + 1, first + 30, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_records(tmp_path) == [record(0)]
        write(path, record(1))
        assert path.read_bytes() == whole
    path.write_bytes(whole[:5])
    write(path)
    assert path.read_bytes() == b""


def test_lines_that_are_no_records_and_records_that_are_there_twice(tmp_path: Path) -> None:
    write(tmp_path / "records-0.jsonl", record(0))
    for line in ("{", "[]", '{"task": "made:short"}'):
        (tmp_path / "records-1.jsonl").write_text(f"{line}\n")
        with pytest.raises(ValueError, match=r"records-1\.jsonl, line 1 is no record"):
            read_records(tmp_path)
    (tmp_path / "records-1.jsonl").unlink()
    write(tmp_path / "records-1.jsonl", record(1), record(0, score=0.7))
    with pytest.raises(ValueError, match=r"records-1\.jsonl, line 2 repeats"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"index": [0]}, "index must be a whole number, got [0]"),
        ({"length": "777"}, "length must be a whole number, got '777'"),
        ({"kept_tokens": None}, "kept_tokens must be a number, got None"),
        ({"score": 50}, "score must be from 0 to 1, got 50"),
        ({"score": math.nan}, "score must be from 0 to 1, got nan"),
        ({"prediction": None}, "prediction must be a text, got None"),
        ({"references": ["a", 7]}, "references.1 must be a text, got 7"),
        ({"facts": None}, "facts must be an object, got None"),
        ({"seconds": {}}, "it has no seconds.prefill, seconds.first_step, seconds.decode, seconds.compile"),
        ({"seconds": dict.fromkeys(SECONDS, "1")}, "seconds.prefill must be a number, got '1'"),
    ],
)
def test_fields_of_records(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path / "records.jsonl", record(0), record(**{"index": 1} | changes))
    with pytest.raises(ValueError, match=re.escape(f"records.jsonl, line 2 is no record: {message}")):
        read_records(tmp_path)


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    file.append(record(0))
    with pytest.raises(ValueError, match=re.escape(f"another process is writing {path}")):
        RecordFile(path)
    file.append(record(1))
    file.close()
    write(path, record(2))
    assert read_records(tmp_path) == [record(0), record(1), record(2)]


def test_means_count_every_record_of_a_task_a_length_and_a_rule() -> None:
    records = [record(0), record(1, score=0.0, prediction=""), record(2, score=0.5)]
    records += [record(0, length=200), record(0, policy="full", compression=None)]
    policy = "inertiakv:alpha=0.3"
    assert means(records) == [
        Mean("made:short", 100, policy, 0.9, None, 3, pytest.approx(0.2)),
        Mean("made:short", 200, policy, 0.9, None, 1, 0.1),
        Mean("made:short", 100, "full", None, None, 1, 0.1),
    ]
    assert label(policy, 0.9, None) == "inertiakv:alpha=0.3@0.9"


# Groups
# ----------------------------------------------------------------------------------------------------------


def test_groups_are_tasks_at_lengths_with_as_many_samples_as_there_are(loaded: Any) -> None:
    task, rows = made(loaded), FakeDataTask()
    groups = make_groups([task, rows], [100, 200], 7)
    assert [(group.task, group.length, list(group.indices)) for group in groups] == [
        (task, 100, [*range(7)]),
        (task, 200, [*range(7)]),
        (rows, None, [*range(5)]),
    ]
    assert count(groups, some_rules()) == 19 * len(POLICIES)
    assert len(make_groups([rows], [], None)[0].indices) == 5
    assert len(make_groups([rows], [], 3)[0].indices) == 3
    with pytest.raises(ValueError, match="made:short makes as many samples as are asked for: give --samples"):
        make_groups([task], [100], None)


@given(st.integers(0, 30), st.integers(1, 7))
def test_processes_share_the_samples(samples: int, ranks: int) -> None:
    group, rules = Group(FakeDataTask(), None, range(samples)), some_rules("full", "inertiakv")
    shares = [list(group.share(rank, ranks).keys(rules)) for rank in range(ranks)]
    together = [key for share in shares for key in share]
    assert sorted(together, key=str) == sorted(group.keys(rules), key=str)
    assert len(set(together)) == 2 * samples
    sizes = list(map(len, shares))
    assert max(sizes) - min(sizes) <= 2


# Answers
# ----------------------------------------------------------------------------------------------------------


def test_records_say_what_a_decoder_does_with_the_prompt_alone(loaded: Any) -> None:
    model, prompting = loaded
    rules, group = some_rules(), Group(made(loaded), 160, range(3))
    records = list(evaluation(loaded, rules, batch=3).answer([group]))
    assert {r.key for r in records} == set(group.keys(rules))
    for r in records:
        sample = group.task.sample(160, r.index)
        text = letters(f"0 made:short 160 {r.index}", len(sample.prompt))
        ids = encode_chat(prompting.tokenizer, [{"role": "user", "content": text}])
        ids += prompting.tokenizer(" So:", add_special_tokens=False)["input_ids"]
        (rule,) = [rule for rule in rules if rule.key == (r.policy, r.compression, r.budget_asked)]
        decoder = Decoder(model, rule.eviction, compile=False)
        out = decoder.generate(ids, NEW_TOKENS)
        assert r.prediction == prompting.tokenizer.decode(out.tokens[0], skip_special_tokens=True)
        assert (r.prompt_tokens, r.prompt_sha256, r.bos_count) == (len(ids), prompt_hash(ids), 1)
        assert 160 - NEW_TOKENS - 4 < r.prompt_tokens <= 160 - NEW_TOKENS
        assert r.budget == (None if rule.eviction is None else int(0.25 * len(ids)))
        assert r.kept_tokens == out.stats.kept_tokens[0]
        assert (r.answer_tokens, r.finish_reason) == (NEW_TOKENS, "length")
        assert r.score == group.task.score(r.prediction, sample) > 0
        assert (r.references, r.facts) == (["a"], {"depth": r.index})
        assert list(r.seconds) == ["prefill", "first_step", "decode", "compile"]
        assert r.seconds["prefill"] > 0
        assert r.seconds["decode"] > 0
        assert r.cache_bytes == out.stats.cache_bytes
        assert json.loads(json.dumps(dataclasses.asdict(r)))["kept_tokens"] == r.kept_tokens
    assert len({r.prediction for r in records}) > 5


def test_a_prompt_is_read_once_for_all_rules(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    for name in ("prefill", "take_prompt", "generate"):
        method = getattr(Decoder, name)

        def spy(self: Decoder, *args: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
            calls.append((_name, len(args[0]) if _name == "prefill" else 0))
            return _method(self, *args, **options)

        monkeypatch.setattr(Decoder, name, spy)
    rules = some_rules()
    records = list(evaluation(loaded, rules, batch=2).answer(make_groups([made(loaded)], [120], 5)))
    assert len(records) == 5 * len(rules)
    others = [("take_prompt", 0)] * (len(rules) - 1)  # the full cache is the one that was read
    assert calls == [("prefill", 2), *others] * 2 + [("prefill", 1), *others]


@pytest.mark.slow
@pytest.mark.parametrize("filled", [False, True])
def test_a_sample_s_record_does_not_depend_on_its_batch(loaded: Any, filled: bool) -> None:
    tasks = [made(loaded, "made:long"), FakeDataTask()]
    groups = make_groups(tasks, [130], 5)
    alone = by_key(list(evaluation(loaded, some_rules()).answer(groups)))
    assert {r["answer_tokens"] for r in alone.values()} == {NEW_TOKENS, NEW_TOKENS + 3}
    assert {r["bos_count"] for r in alone.values()} == {1}
    of_batch = evaluation(loaded, some_rules(), batch=3)
    of_batch.compile = filled  # graphs need batches of one size; these run uncompiled
    assert by_key(list(of_batch.answer(groups))) == alone
    few = make_groups(tasks, [130], 2)
    assert by_key(list(evaluation(loaded, some_rules(), batch=2).answer(few))).items() <= alone.items()


def test_answers_of_other_lengths_are_apart_where_one_has_no_room(loaded: Any) -> None:
    group, rules = Group(made(loaded, "made:long"), 511, [1, 2, 3]), some_rules("full", "inertiakv")
    records = by_key(list(evaluation(loaded, rules, batch=3).answer([group])))
    assert records == by_key(list(evaluation(loaded, rules).answer([group])))
    most = {r["index"]: r["prompt_tokens"] + r["answer_tokens"] for r in records.values()}
    assert most == {1: 504 + NEW_TOKENS, 2: 503 + NEW_TOKENS, 3: 502 + NEW_TOKENS + 3}


def test_batches_are_of_similar_lengths_where_data_decide(loaded: Any) -> None:
    records = list(
        evaluation(loaded, some_rules("full"), batch=2).answer([Group(FakeDataTask(), None, range(5))])
    )
    assert [r.prompt_tokens for r in records] == sorted(r.prompt_tokens for r in records)


@share(4)
@given(st.integers(0, 2**32 - 1))
def test_what_is_done_is_not_done_again(loaded: Any, done: int) -> None:
    groups, rules = make_groups([made(loaded)], [100], 4), some_rules("full", "inertiakv", "lazy4")
    keys = [key for group in groups for key in group.keys(rules)]
    there = {key for number, key in enumerate(keys) if done >> number & 1}
    made_now = [r.key for r in evaluation(loaded, rules, batch=3).answer(groups, there)]
    assert sorted(made_now, key=str) == sorted(set(keys) - there, key=str)


def test_an_answer_ends_with_the_model_s_own_end_which_is_no_part_of_it(loaded: Any, tmp_path: Path) -> None:
    groups, rules = make_groups([made(loaded)], [100], 4), some_rules("full")
    free = {r.index: r for r in evaluation(loaded, rules).answer(groups)}
    model, prompting = loaded
    decoder = Decoder(model, None, compile=False)
    sample = groups[0].task.sample(100, 0)
    ids = prompting.encode(sample.prompt, sample.answer_prefix)
    tokens = decoder.generate(ids, NEW_TOKENS).tokens[0]
    cut = tokens.index(tokens[2])
    folder = tiny_chat(tmp_path / "model", max_positions=512)
    set_eos(folder, tokens[2])
    ending, _ = load_model(str(folder), dtype="float64", device="cpu")
    (r,) = [r for r in evaluation((ending, prompting), rules).answer(groups) if r.index == 0]
    assert (r.answer_tokens, r.finish_reason) == (cut + 1, "eos")
    assert r.prediction == prompting.tokenizer.decode(tokens[:cut], skip_special_tokens=True)
    assert len(r.prediction) < len(free[0].prediction)


def test_an_empty_prediction_is_wrong_and_counts(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_groups([made(loaded)], [100], 3)
    for text in ("", " \n"):
        monkeypatch.setattr("inertiakv.evals.run.decode_answer", lambda *_, text=text: text)
        records = list(evaluation(loaded, some_rules("full")).answer(groups))
        assert [(r.prediction, r.score) for r in records] == [(text, 0.0)] * 3
        assert means(records)[0].n == 3


# What cannot be
# ----------------------------------------------------------------------------------------------------------


def test_prompts_that_do_not_fit_are_found_before_any_is_answered(loaded: Any) -> None:
    rows = make_groups([FakeDataTask()], [], None)
    rules = choose_rules(["inertiakv", "snapkv"], [0.75], [])
    with pytest.raises(ValueError, match=r"rows, sample 1: snapkv@0.75: recent \(32\) protect more tokens"):
        evaluation(loaded, rules).check(rows)
    evaluation(loaded, choose_rules(["full", "inertiakv"], [0.75], [])).check(rows)
    long = make_groups([made(loaded)], [600], 2)
    with pytest.raises(ValueError, match=r"made:short at 600 tokens, sample 0: .* the model's 512 positions"):
        evaluation(loaded, some_rules("full")).check(long)
    tiny = make_groups([made(loaded)], [20], 2)
    with pytest.raises(ValueError, match="20 tokens are too few"):
        evaluation(loaded, some_rules("full")).check(tiny)


def test_all_prompts_are_made_where_a_length_may_be_too_short_for_some(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, asking = made(loaded), evaluation(loaded, some_rules("full"))
    least = next(length for length in range(512) if _can(task, length, 0))
    groups = make_groups([task], [least + 2], 4)
    with pytest.raises(ValueError, match=f"{least + 2} tokens are too few"):  # for sample 3 alone
        asking.check(groups)
    asking.check(make_groups([task], [least + 3], 4))
    indices: list[int] = []
    question = asking._question
    monkeypatch.setattr(asking, "_question", lambda group, i: indices.append(i) or question(group, i))
    asking.check(make_groups([task], [4 * least], 4))
    asking.check([Group(task, 4 * least, [])])
    assert indices == [0]


def _can(task: FakeTask, length: int, index: int) -> bool:
    with contextlib.suppress(ValueError):
        return bool(task.sample(length, index))
    return False


def test_a_later_prompt_that_does_not_fit_is_named_too(loaded: Any) -> None:
    groups = make_groups([made(loaded)], [400], 4)
    tokens = [len(evaluation(loaded, [])._question(groups[0], i).ids) for i in range(4)]
    assert tokens[3] < tokens[0]
    some = choose_rules([f"inertiakv:recent={tokens[0] // 4}"], [0.75], [])
    asking = evaluation(loaded, some, batch=1)
    asking.check(groups)
    with pytest.raises(ValueError, match=r"made:short at 400 tokens, sample [123]: inertiakv:recent="):
        list(asking.answer(groups))


def test_layers_that_the_model_has_not(loaded: Any) -> None:
    with pytest.raises(ValueError, match=r"inertiakv:layers=99@0.75: "):
        evaluation(loaded, some_rules("inertiakv:layers=99"))


def test_memory_that_does_not_suffice(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_groups([made(loaded)], [100], 3)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 1)
    with pytest.raises(
        MemoryError, match=r"^the full cache, 2 prompts of at most \d+ tokens: needs .* --batch"
    ):
        list(evaluation(loaded, some_rules(), batch=2).answer(groups))
