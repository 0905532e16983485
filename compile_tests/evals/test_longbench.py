"""LongBench and LongBench-v2: golden prompts, templates, truncation, files and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from compile_tests.tiny_chat import BOS, tiny_tokenizer
from inertiakv.evals import data_files
from inertiakv.evals.longbench import LongBench, LongBenchV2, cut_middle
from inertiakv.evals.longbench_prompts import PAPER, PROMPTS
from inertiakv.evals.task import Prompting

GOLDEN = json.loads((Path(__file__).parent / "longbench_prompts.json").read_text(encoding="utf-8"))
LONG = 200_000
ROW = {
    "input": "Who keeps {braces}?",
    "context": "Passage 1:\nThe keeper.",
    "answers": ["the keeper", "a keeper of ships", "Keeper"],
    "length": 3,
    "_id": "abc",
}
ROW_V2 = {
    "_id": "abc",
    "domain": "Law",
    "difficulty": "hard",
    "length": "short",
    "question": " Which?\n",
    "choice_A": "one ",
    "choice_B": "two",
    "choice_C": "three",
    "choice_D": "four",
    "answer": "C",
    "context": "\nA long document.\n",
}


def prompting(kind: str = "llama", template: Literal["chat", "none"] = "chat") -> Prompting:
    return Prompting(tiny_tokenizer(kind), template)


def write(folder: Path, name: str, *objects: Any) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in objects), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any) -> None:
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr(data_files, "hub_rows", unreachable)


def test_prompts_are_the_published_ones() -> None:
    assert {name: prompt.text for name, prompt in PROMPTS.items()} == GOLDEN


def test_lengths_metrics_and_templates_are_the_published_ones() -> None:
    lengths = [(name, prompt.max_new_tokens, prompt.metric) for name, prompt in PROMPTS.items()]
    assert lengths == [
        ("hotpotqa", 32, "qa_f1"),
        ("2wikimqa", 32, "qa_f1"),
        ("musique", 32, "qa_f1"),
        ("qasper", 128, "qa_f1"),
        ("gov_report", 512, "rouge-l"),
        ("multi_news", 512, "rouge-l"),
        ("qmsum", 512, "rouge-l"),
        ("passage_retrieval_en", 32, "retrieval"),
        ("narrativeqa", 128, "qa_f1"),
        ("multifieldqa_en", 64, "qa_f1"),
        ("triviaqa", 32, "qa_f1"),
        ("samsum", 128, "rouge-l"),
        ("passage_count", 32, "count"),
    ]
    assert list(PAPER) == [name for name, *_ in lengths[:8]]
    assert {name for name, prompt in PROMPTS.items() if not prompt.chat} == {"triviaqa", "samsum"}
    assert {name for name, prompt in PROMPTS.items() if prompt.first_line} == {"triviaqa", "samsum"}


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_a_sample_is_the_filled_prompt_with_one_bos(tmp_path: Path, kind: str) -> None:
    put = prompting(kind)
    write(tmp_path, "hotpotqa.jsonl", ROW)
    task = LongBench("longbench:hotpotqa", prompting=put, max_positions=LONG, data=tmp_path)
    found = (task.name, task.metric, task.lengths, task.count(None))
    assert found == ("longbench:hotpotqa", "qa_f1", False, 1)
    sample = task.sample(None, 0)
    assert sample.prompt == GOLDEN["hotpotqa"].format(**ROW)
    assert sample.references == ("the keeper", "a keeper of ships", "Keeper")
    assert (sample.answer_prefix, sample.max_new_tokens, sample.chat) == ("", 32, True)
    assert sample.facts["_id"] == "abc"
    assert sample.facts["cut"] is False
    assert task.score("ships of a keeper", sample) == pytest.approx(1)

    ids = put.encode(sample.prompt, sample.answer_prefix, chat=sample.chat)
    assert put.count_bos(ids) == (1 if kind == "llama" else 0)
    text = put.tokenizer.decode(ids)
    if kind == "llama":
        assert text == f"{BOS}[user]{sample.prompt}</s>[assistant]"
    else:
        assert text == f"<|im_start|>user\n{sample.prompt}<|im_end|>\n<|im_start|>assistant\n"


def test_examples_to_continue_take_no_template_and_one_line_is_scored(tmp_path: Path) -> None:
    put = prompting()
    write(tmp_path, "triviaqa.jsonl", ROW)
    task = LongBench("longbench:triviaqa", prompting=put, max_positions=LONG, data=tmp_path)
    sample = task.sample(None, 0)
    assert sample.chat is False
    ids = put.encode(sample.prompt, sample.answer_prefix, chat=sample.chat)
    assert put.tokenizer.decode(ids) == BOS + sample.prompt
    assert put.count_bos(ids) == 1
    assert task.score("\n\nKeeper\nPassage 2", sample) == 1
    assert task.score("", sample) == 0

    write(tmp_path, "musique.jsonl", ROW)
    musique = LongBench("longbench:musique", prompting=put, max_positions=LONG, data=tmp_path)
    assert musique.score("Keeper\nPassage 2", sample) == pytest.approx(2 / (3 + 1))


def test_rouge_and_retrieval_tasks_score_and_say_by_what(tmp_path: Path) -> None:
    write(tmp_path, "data/multi_news.jsonl", ROW | {"input": ""})
    write(tmp_path, "data/passage_retrieval_en.jsonl", ROW | {"answers": ["Paragraph 12"]})
    options: Any = {"prompting": prompting(), "max_positions": LONG, "data": tmp_path}
    news = LongBench("longbench:multi_news", **options)
    assert news.metric.startswith("rouge-l f (rouge ")
    assert news.score("the keeper", news.sample(None, 0)) == pytest.approx(1, abs=1e-6)
    retrieval = LongBench("longbench:passage_retrieval_en", **options)
    assert retrieval.score("Paragraph 12", retrieval.sample(None, 0)) == 1


@pytest.mark.parametrize("template", ["chat", "none"])
@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_a_long_prompt_loses_its_middle(tmp_path: Path, kind: str, template: Any) -> None:
    put = prompting(kind, template)
    write(tmp_path, "qasper.jsonl", ROW | {"context": "é" * 3000})
    options: Any = {"prompting": put, "data": tmp_path, "max_positions": 2048}
    task = LongBench("longbench:qasper", **options)
    sample = task.sample(None, 0)
    tokens = put.count(sample.prompt)
    assert 2048 - 128 - 4 <= tokens <= 2048 - 128  # an é is two tokens, and may be cut in two
    assert sample.facts["cut"] is True
    assert sample.facts["uncut_tokens"] == len(put.tokenizer(GOLDEN["qasper"].format(**ROW)).input_ids) + (
        6000 - len(ROW["context"])
    )
    assert sample.prompt.startswith("You are given a scientific article")
    assert sample.prompt.endswith("Question: Who keeps {braces}?\n\nAnswer:")

    task.max_length = 1500
    shorter = task.sample(None, 0)
    assert shorter.facts["max_length"] == 1500
    assert put.count(shorter.prompt) < tokens
    task.max_length = 31500  # no more than the model can take
    assert task.sample(None, 0) == sample


@pytest.mark.parametrize(
    "length, joined, text",
    [
        (6, False, "01789"),  # the BOS takes a place and is left out
        (7, False, "01789"),
        (6, True, "01789"),
        (7, True, "016789"),
    ],
)
def test_halves_are_of_the_raw_prompt_with_its_bos(length: int, joined: bool, text: str) -> None:
    tokenizer = tiny_tokenizer("llama")
    ids = tokenizer("0123456789").input_ids  # BOS and ten letters
    assert cut_middle(tokenizer, ids, length, joined=joined) == text


def test_text_of_several_tokens_a_letter_is_cut_until_it_fits(tmp_path: Path) -> None:
    put = prompting("llama", "none")
    write(
        tmp_path, "longbench-v2.jsonl", ROW_V2 | {"context": "€" * 400}
    )  # each three tokens, as half of one
    for positions in range(500, 512):
        sample = LongBenchV2(put, positions, tmp_path).sample(None, 0)
        assert positions - 128 - 6 <= put.count(sample.prompt) <= positions - 128
        assert sample.facts["max_length"] <= positions - 128


def test_no_room_for_a_prompt(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa.jsonl", ROW)
    task = LongBench("longbench:hotpotqa", prompting(), 40, tmp_path)
    with pytest.raises(ValueError, match=r"nothing is left .* 40 positions .* answer of 32"):
        task.sample(None, 0)


def test_v2_is_the_published_prompt_and_keeps_what_results_are_grouped_by(tmp_path: Path) -> None:
    write(tmp_path, "longbench-v2.jsonl", ROW_V2, ROW_V2 | {"answer": "A"})
    put = prompting()
    task = LongBenchV2(prompting=put, max_positions=LONG, data=tmp_path)
    assert (task.count(None), task.lengths, task.metric) == (2, False, "accuracy")
    sample = task.sample(None, 0)
    assert sample.prompt == (
        "Please read the following text and answer the question below.\n\n"
        "<text>\nA long document.\n</text>\n\n"
        "What is the correct answer to this question: Which?\n"
        "Choices:\n(A) one\n(B) two\n(C) three\n(D) four\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    assert sample.max_new_tokens == 128
    assert {key: sample.facts[key] for key in ("difficulty", "length", "max_length", "cut")} == {
        "difficulty": "hard",
        "length": "short",
        "max_length": 120_000,
        "cut": False,
    }
    assert task.score("The correct answer is (C).", sample) == 1
    assert task.score("The correct answer is (C).", task.sample(None, 1)) == 0
    assert task.score("", sample) == 0

    short = LongBenchV2(prompting=put, max_positions=400, data=tmp_path).sample(None, 0)
    assert put.count(short.prompt) == 400 - 128
    assert short.prompt.startswith("Please read")
    assert short.prompt.endswith('(insert answer here)".')


def test_rows_come_from_parquet_and_lists_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    options: Any = {"prompting": prompting(), "max_positions": LONG}
    write(tmp_path / "a", "hotpotqa.jsonl", ROW, ROW | {"_id": "second"})
    (tmp_path / "b" / "hotpotqa").mkdir(parents=True)
    table = pyarrow.Table.from_pylist([ROW, ROW | {"_id": "second"}])
    parquet.write_table(table, tmp_path / "b" / "hotpotqa" / "test-00000-of-00001.parquet")
    lines, columns = (LongBench("longbench:hotpotqa", data=tmp_path / folder, **options) for folder in "ab")
    assert [lines.sample(None, index) for index in range(2)] == [
        columns.sample(None, index) for index in range(2)
    ]
    assert lines.source != columns.source
    assert "sha256" in columns.source

    (tmp_path / "data.json").write_text(json.dumps([ROW_V2, ROW_V2]), encoding="utf-8")
    assert LongBenchV2(data=tmp_path, **options).count(None) == 2


def test_rows_come_from_the_hub_where_no_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(data_files, "hub_rows", lambda *arguments: asked.append(arguments) or [ROW])
    options: Any = {"prompting": prompting(), "max_positions": LONG}
    task = LongBench("longbench:2wikimqa", **options)
    assert (task.count(None), asked) == (1, [("Xnhyacinth/LongBench", "2wikimqa", "test")])
    assert "Xnhyacinth/LongBench 2wikimqa test" in task.source


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"input": "", "context": "", "answers": ["x"]}\n\n{"input"', r"line 3 is not JSON"),
        (json.dumps({"input": "", "context": ""}), "row 1 has no field 'answers'"),
        (json.dumps(ROW) + "\n" + json.dumps(ROW | {"context": None}), "row 2: 'context' is not a str"),
        (json.dumps(ROW | {"answers": []}), "row 1: 'answers' is not a list of texts"),
        (json.dumps(ROW | {"answers": [1]}), "row 1: 'answers' is not a list of texts"),
        ("[1]", "row 1 is not an object"),
        ("", "has no rows"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "hotpotqa.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"hotpotqa\.jsonl.*{message}"):
        LongBench("longbench:hotpotqa", prompting=prompting(), max_positions=LONG, data=tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("data.json", b"{}", "not a list"),
        ("data.json", b"[1", "not valid JSON"),
        ("longbench-v2.jsonl", b"\xff", "not UTF-8 text"),
        ("longbench-v2.parquet", b"PAR1", "not a parquet file"),
    ],
)
def test_wrong_formats_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is {message}"):
        LongBenchV2(prompting=prompting(), max_positions=LONG, data=tmp_path)


def test_a_folder_that_lacks_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "hub_rows", lambda *_: pytest.fail("asked the hub"))
    looked = r"qasper\.jsonl, data/qasper\.jsonl, qasper\.parquet, qasper/test-00000-of-00001\.parquet$"
    with pytest.raises(FileNotFoundError, match=rf"longbench:qasper: {tmp_path} has none of {looked}"):
        LongBench("longbench:qasper", prompting=prompting(), max_positions=LONG, data=tmp_path)


def test_no_data_at_all_is_said_at_once() -> None:
    options: Any = {"prompting": prompting(), "max_positions": LONG}
    with pytest.raises(FileNotFoundError, match=r"longbench-v2: no data folder was given; and the hub"):
        LongBenchV2(**options)
