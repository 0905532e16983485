"""Questions on documents among others: qa_1 (SQuAD 2.0), qa_2 (HotpotQA)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from inertiakv.models.files import read_json

from ..data_files import find_file, hub_rows
from ..metrics import string_match_part
from ..task import CountTokens
from .generated import Draw, Generated
from .templates import DOCUMENT, QUESTIONS


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    """Those that belong to it."""
    related: tuple[int, ...]
    """Those that go beside them first: the rest of the same article."""


@dataclass(frozen=True)
class Corpus:
    """`name` says where it comes from: a path, `hub:...`."""

    name: str
    documents: list[str]
    questions: list[Question]

    @cached_property
    def sha256(self) -> str:
        """Of documents, questions and answers, wherever they come from."""
        asked = [[question.text, question.answers] for question in self.questions]
        return hashlib.sha256(json.dumps([self.documents, asked]).encode()).hexdigest()


class Row(NamedTuple):
    """A question as its source has it."""

    text: str
    answers: list[str]
    """Where there are none the question can't be answered, and is left out."""
    documents: list[str]
    article: str | None
    """What its documents are part of."""


def _squad(data: Any) -> Iterator[Row]:
    """From the published file, or the hub's rows."""
    if not isinstance(data, dict):
        for row in data:
            yield Row(row["question"], row["answers"]["text"], [row["context"]], row["title"])
        return
    for number, article in enumerate(data["data"]):
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                impossible = asked.get("is_impossible", False)  # SQuAD 1.1 asks nothing that is
                answers = [] if impossible else [answer["text"] for answer in asked["answers"]]
                yield Row(asked["question"], answers, [paragraph["context"]], str(number))


def _hotpot(data: Any) -> Iterator[Row]:
    """From the published file, or the hub's rows, which have titles and sentences apart."""
    for row in data:
        context = row["context"]
        if isinstance(context, dict):
            context = zip(context["title"], context["sentences"], strict=True)
        documents = [f"{title}\n{''.join(sentences)}" for title, sentences in context]
        yield Row(row["question"], [row["answer"]], documents, None)


class Source(NamedTuple):
    title: str
    files: tuple[str, ...]
    """Names that a file of it may have: its publisher's, RULER's."""
    hub: tuple[str, str | None, str]
    read: Callable[[Any], Iterable[Row]]


SOURCES = {
    "qa_1": Source(
        "SQuAD 2.0", ("dev-v2.0.json", "squad.json"), ("rajpurkar/squad_v2", None, "validation"), _squad
    ),
    "qa_2": Source(
        "HotpotQA",
        ("hotpot_dev_distractor_v1.json", "hotpotqa.json"),
        ("hotpotqa/hotpot_qa", "distractor", "validation"),
        _hotpot,
    ),
}


def load_corpus(task: str, data: Path | None) -> Corpus:
    """From a file in the folder `data`, or from the hub where that is None. Raises FileNotFoundError where it
    is not there, ValueError for a file that has something else."""
    source = SOURCES[task]
    file = find_file(f"ruler:{task} ({source.title})", source.files, data)
    if file is not None:
        return _corpus(str(file), _read(file, source))
    try:
        return _corpus(f"hub:{source.hub[0]}", [*source.read(hub_rows(*source.hub))])
    except (ImportError, ConnectionError) as error:
        raise FileNotFoundError(
            f"no data for ruler:{task}, which needs {source.title}, as {' or '.join(source.files)} in a data "
            f"folder, or from the hub: no data folder was given; and {error}"
        ) from error


def _read(path: Path, source: Source) -> list[Row]:
    try:
        rows = list(source.read(read_json(path)))
        for row in rows:
            for text in (row.text, *row.answers, *row.documents):
                if not isinstance(text, str):
                    raise TypeError(f"{text!r:.40} is no text")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not {source.title}: {type(error).__name__}: {error}") from error
    return rows


def _corpus(name: str, rows: Sequence[Row]) -> Corpus:
    documents = sorted({document for row in rows for document in row.documents})
    number = {document: place for place, document in enumerate(documents)}
    articles: dict[str | None, dict[int, None]] = {}
    for row in rows:
        articles.setdefault(row.article, {}).update((number[document], None) for document in row.documents)
    questions = []
    for row in rows:
        own = tuple(dict.fromkeys(number[document] for document in row.documents))
        article = articles[row.article] if row.article is not None else ()
        related = tuple(place for place in article if place not in own)
        if row.answers:
            questions.append(Question(row.text, tuple(dict.fromkeys(row.answers)), own, related))
    if not questions:
        raise ValueError(f"{name} has no question that has an answer")
    return Corpus(name, documents, questions)


class DocumentQuestions(Generated):
    """Questions in the order of their source, each with its documents among others. Units are documents.
    `source` says where they come from."""

    metric = "string_match_part"
    match = staticmethod(string_match_part)
    max_new_tokens = QUESTIONS.max_new_tokens

    def __init__(self, name: str, count_tokens: CountTokens, seed: int, corpus: Corpus) -> None:
        super().__init__(name, count_tokens, seed)
        self.corpus = corpus
        self.source = f"{corpus.name} (sha256 {corpus.sha256})"

    def count(self, length: int | None) -> int | None:
        return len(self.corpus.questions)

    def bounds(self, length: int, index: int) -> tuple[int, int | None]:
        return len(self.corpus.questions[index].documents), len(self.corpus.documents)

    def draw(self, rng: Random, length: int, index: int, units: int) -> Draw:
        question = self.corpus.questions[index]
        related = rng.sample(question.related, len(question.related))
        chosen = dict.fromkeys([*question.documents, *related][:units])
        while len(chosen) < units:
            chosen[rng.randrange(len(self.corpus.documents))] = None
        places = list(chosen)
        rng.shuffle(places)
        context = "\n\n".join(
            DOCUMENT.format(number=number, text=self.corpus.documents[place])
            for number, place in enumerate(places, start=1)
        )
        depths = [round(100 * places.index(place) / units) for place in question.documents]
        return Draw(
            prompt=QUESTIONS.prompt.format(context=context, query=question.text),
            answer_prefix=QUESTIONS.answer_prefix,
            references=question.answers,
            facts={"keys": [question.text], "depths": depths, "data": self.corpus.name},
        )
