"""RULER's questions on documents, from small files made like SQuAD's and HotpotQA's. No network."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_tests.examples import share
from inertiakv.evals.essays import load_essays
from inertiakv.evals.ruler import make
from inertiakv.evals.ruler import qa as ruler_qa
from inertiakv.evals.ruler.generated import Generated
from inertiakv.evals.ruler.qa import load_corpus
from inertiakv.evals.ruler.templates import QUESTIONS

ARTICLES, PARAGRAPHS = 8, 6
NAMES = ("qa_1", "qa_2")


def paragraph(article: int, number: int) -> str:
    filler = " ".join(Random(100 * article + number).choices(["and", "so", "it", "was"], k=20 + 3 * number))
    return f"The code of a{article}p{number} is c{article}q{number}. {filler}."


def count_words(prompt: str, answer_prefix: str) -> int:
    return len(prompt.split()) + len(answer_prefix.split())


def squad() -> dict[str, Any]:
    def questions(article: int, number: int) -> list[dict[str, Any]]:
        answers = [{"text": text} for text in (f"c{article}q{number}", f"c{article}q{number}", "the code")]
        return [
            {"question": "Who asks?", "is_impossible": True, "answers": [], "plausible_answers": answers},
            {"question": f"The code of a{article}p{number}?", "is_impossible": False, "answers": answers},
        ]

    def paragraphs(article: int) -> list[dict[str, Any]]:
        return [
            {"context": paragraph(article, number), "qas": questions(article, number)}
            for number in range(PARAGRAPHS)
        ]

    return {"data": [{"title": f"T{a}", "paragraphs": paragraphs(a)} for a in range(ARTICLES)]}


def hotpot() -> list[dict[str, Any]]:
    def context(article: int) -> list[tuple[str, list[str]]]:
        halves = [paragraph(article, number).partition(". ") for number in range(PARAGRAPHS)]
        return [(f"a{article}p{number}", [a + b, c]) for number, (a, b, c) in enumerate(halves)]

    return [
        {"question": f"Article {article}?", "answer": f"c{article}q3", "context": context(article)}
        for article in range(ARTICLES)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "dev-v2.0.json").write_text(json.dumps(squad()))
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot()))
    return folder


@pytest.fixture(scope="module")
def tasks(data: Path) -> dict[str, Generated]:
    return {name: make(f"ruler:{name}", count_words, 42, load_essays(), data) for name in NAMES}


def documents(prompt: str) -> list[str]:
    """Those of a prompt, whose numbers must be right."""
    before, after = QUESTIONS.prompt.split("{context}")
    context = prompt.removeprefix(before).split(after.split("{query}")[0])[0]
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", context)
    assert parts[1::2] == [str(number) for number in range(1, len(parts) // 2 + 1)]
    return parts[2::2]


@pytest.mark.parametrize("name", NAMES)
@share(2)
@given(length=st.integers(512, 2500), index=st.integers(0, ARTICLES - 1))
def test_documents(tasks: dict[str, Generated], name: str, length: int, index: int) -> None:
    task = tasks[name]
    sample = task.sample(length, index)
    corpus = task.corpus  # type: ignore[attr-defined]
    assert task.source == f"{corpus.name} (sha256 {corpus.sha256})"  # type: ignore[attr-defined]
    question = corpus.questions[index]
    found = documents(sample.prompt)
    assert len(found) == len(set(found)) == sample.facts["units"]
    assert set(found) <= set(corpus.documents)
    assert sample.references == question.answers
    own = [corpus.documents[place] for place in question.documents]
    assert sample.facts["depths"] == [round(100 * found.index(text) / len(found)) for text in own]
    # What belongs to the question is there, then the rest of its article, then others.
    related = {corpus.documents[place] for place in question.related}
    assert related <= set(found) or len(set(found) - related) == len(own)
    assert sample.prompt.count(f" {question.answers[0]}.") == 1
    used = count_words(sample.prompt, sample.answer_prefix) + sample.max_new_tokens
    assert used <= length
    longest = max(len(text.split()) for text in corpus.documents) + 2
    assert used > length - longest or len(found) == len(corpus.documents)


@pytest.mark.parametrize("name", NAMES)
def test_questions(tasks: dict[str, Generated], name: str) -> None:
    task = tasks[name]
    assert task.count(4096) == (ARTICLES * PARAGRAPHS if name == "qa_1" else ARTICLES)
    assert task.metric == "string_match_part"
    sample = task.sample(600, 3)
    assert sample == task.sample(600, 3)
    assert sample.max_new_tokens == 32
    assert task.score(f"It is {sample.references[0].upper()}!", sample) == 1
    assert task.score("", sample) == 0
    if name == "qa_1":
        assert sample.references == ("c0q3", "the code")
        assert task.score("The code", sample) == 1
    with pytest.raises(ValueError, match=rf"ruler:{name}, sample 3: a length of 60 tokens is too short"):
        task.sample(60, 3)


def test_a_prompt_with_a_document(tasks: dict[str, Generated]) -> None:
    drawn = tasks["qa_1"].draw(Random(0), 512, 1, 1)
    instruction = (
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words.\n\n"
    )
    assert drawn.prompt == (
        f"{instruction}The following are given documents.\n\nDocument 1:\n{paragraph(0, 1)}\n\n{instruction}"
        "Question: The code of a0p1?"
    )
    assert drawn.answer_prefix == " Answer:"
    drawn = tasks["qa_2"].draw(Random(0), 512, 1, PARAGRAPHS)
    assert f":\na1p2\n{paragraph(1, 2)}\n\n" in drawn.prompt


def test_the_same_from_the_hub(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(repository: str, config: str | None, split: str) -> list[dict[str, Any]]:
        assert split == "validation"
        if repository == "rajpurkar/squad_v2":
            return [
                {
                    "title": article["title"],
                    "context": part["context"],
                    "question": asked["question"],
                    "answers": {"text": [answer["text"] for answer in asked["answers"]]},
                }
                for article in squad()["data"]
                for part in article["paragraphs"]
                for asked in part["qas"]
            ]
        assert (repository, config) == ("hotpotqa/hotpot_qa", "distractor")
        columns = ("title", "sentences")
        return [
            row | {"context": dict(zip(columns, zip(*row["context"], strict=True), strict=True))}
            for row in hotpot()
        ]

    monkeypatch.setattr(ruler_qa, "hub_rows", rows)
    for name in NAMES:
        file, hub = load_corpus(name, data), load_corpus(name, None)
        assert (hub.documents, hub.questions, hub.sha256) == (file.documents, file.questions, file.sha256)
        assert hub.name.startswith("hub:")
        assert file.name.startswith(str(data))
    assert load_corpus("qa_1", None).sha256 != load_corpus("qa_2", None).sha256


def test_squad_1_1_says_of_no_question_that_it_is_impossible(tmp_path: Path) -> None:
    older = squad()
    for article in older["data"]:
        for part in article["paragraphs"]:
            part["qas"] = [{k: asked[k] for k in ("question", "answers")} for asked in part["qas"][1:]]
    (tmp_path / "squad.json").write_text(json.dumps(older))
    assert len(load_corpus("qa_1", tmp_path).questions) == ARTICLES * PARAGRAPHS


@pytest.mark.parametrize(
    "task, content, message",
    [
        ("qa_1", "", "is not valid JSON: Expecting value"),
        ("qa_1", "[]", "has no question that has an answer"),
        ("qa_1", '{"data": null}', "is not SQuAD 2.0: TypeError: "),
        ("qa_1", '{"version": 2}', "is not SQuAD 2.0: KeyError: 'data'"),
        ("qa_1", '{"data": [{"paragraphs": [{"qas": ["?"]}]}]}', "is not SQuAD 2.0: AttributeError: "),
        ("qa_1", '{"data": []}', "has no question that has an answer"),
        ("qa_2", "[]", "has no question that has an answer"),
        ("qa_2", '{"a": 1}', "is not HotpotQA: TypeError: "),
        ("qa_2", '[{"question": "Who?", "answer": null, "context": []}]', "HotpotQA: TypeError: None is no"),
        (
            "qa_2",
            '[{"question": "Who?", "answer": "I", "context": [["a"]]}]',
            "is not HotpotQA: ValueError: ",
        ),
    ],
)
def test_files_that_have_something_else(tmp_path: Path, task: str, content: str, message: str) -> None:
    (file := tmp_path / ruler_qa.SOURCES[task].files[0]).write_text(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} .*{re.escape(message)}") as error:
        load_corpus(task, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("error", [ImportError("no package"), ConnectionError("no answer")])
def test_neither_files_nor_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ruler_qa, "hub_rows", fails)
    match = rf"ruler:qa_1, which needs SQuAD 2.0, as dev-v2.0.json .* given; and {error}"
    with pytest.raises(FileNotFoundError, match=match):
        load_corpus("qa_1", None)


def test_a_folder_that_lacks_the_file_is_not_made_up_for_by_the_hub(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ruler_qa, "hub_rows", lambda *_: pytest.fail("asked the hub"))
    (tmp_path / "dev-v2.0.json").write_bytes((data / "dev-v2.0.json").read_bytes())
    make("ruler:qa_1", count_words, 42, load_essays(), tmp_path)
    looked = "hotpot_dev_distractor_v1.json, hotpotqa.json"
    match = f"ruler:qa_2 (HotpotQA): {tmp_path} has none of {looked}"
    with pytest.raises(FileNotFoundError, match=re.escape(match)):
        make("ruler:qa_2", count_words, 42, load_essays(), tmp_path)
