"""Answering the samples of tasks under several rules: a batch of prompts is read once, for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from inertiakv import Decoder, Generation
from inertiakv.cache.budgets import Budgets
from inertiakv.models import Transformer
from inertiakv.models.encoding import decode_answer
from inertiakv.requests.prompts import check_positions

from .records import SECONDS, Record
from .rules import Rule
from .task import Prompting, Sample, Task, prompt_hash

Key = tuple[Any, ...]
"""As `Record.key`."""


@dataclass(frozen=True)
class Group:
    """Samples of one task at one length, by their indices."""

    task: Task
    length: int | None
    indices: Sequence[int]

    def share(self, rank: int, ranks: int) -> Group:
        """What one of several processes does of it."""
        return Group(self.task, self.length, [i for i in self.indices if i % ranks == rank])

    def keys(self, rules: Iterable[Rule]) -> Iterator[Key]:
        """Of all its records."""
        return (self.key(index, rule) for rule in rules for index in self.indices)

    def key(self, index: int, rule: Rule) -> Key:
        return (self.task.name, self.length, index, *rule.key)


@dataclass(frozen=True)
class Question:
    """A sample as a model is asked it."""

    sample: Sample
    ids: list[int]

    def __str__(self) -> str:
        length = "" if self.sample.length is None else f" at {self.sample.length:,} tokens"
        return f"{self.sample.task}{length}, sample {self.sample.index}"


def make_groups(tasks: Iterable[Task], lengths: Sequence[int], samples: int | None) -> list[Group]:
    """Every task, at every length where it has lengths, with its first `samples` samples, or all of them.
    Raises ValueError where a task leaves it open how many there are."""
    groups = []
    for task in tasks:
        for length in lengths if task.lengths else [None]:
            there = task.count(length)
            if there is None and samples is None:
                raise ValueError(f"{task.name} makes as many samples as are asked for: give --samples")
            number = min(n for n in (there, samples) if n is not None)
            groups.append(Group(task, length, range(number)))
    return groups


def count(groups: Iterable[Group], rules: Sequence[Rule]) -> int:
    """How many records they make."""
    return sum(len(group.indices) for group in groups) * len(rules)


class Evaluation:
    """Asks a model. Two decoders serve the whole run, so that graphs and buffers are shared: one reads the
    prompts, with the full cache, and one answers them under one rule after the other.

    * `batch`: prompts that are read and answered together.
    * `compile`, `attention`, `on_compile`, `on_draft`: as in `Decoder`. With `compile` the last of a group's
      batches is filled up with a repeated prompt, as another batch size would be another graph.
    """

    def __init__(
        self,
        model: Transformer,
        prompting: Prompting,
        rules: Sequence[Rule],
        *,
        batch: int = 1,
        compile: bool | None = None,
        attention: str = "auto",
        on_compile: Callable[[str], None] | None = None,
        on_draft: Callable[[int, int], None] | None = None,
    ) -> None:
        self.model, self.prompting, self.batch, self.compile = model, prompting, batch, compile
        self.rules = sorted(rules, key=lambda rule: rule.eviction is None)  # `full` uses up what was read
        self._tokens: dict[Key, int] = {}

        options: Any = {"attention": attention, "on_compile": on_compile, "on_draft": on_draft}
        self._reader, self._decoder = (Decoder(model, None, compile=compile, **options) for _ in range(2))
        for rule in self.rules:
            with _naming(rule):
                self._decoder.use(rule.eviction)

    def check(self, groups: Iterable[Group]) -> None:
        """Raise ValueError for a prompt that is too long for the model, or too short for a rule, and for a
        length that is too short for a prompt. All prompts are made, but of a task with prompts of any length,
        which are all about as long, and take long to make, only the first where the length is ample."""
        for group in groups:
            for index in group.indices[:1] if _ample(group) else group.indices:
                self._check(self._question(group, index))

    def answer(self, groups: Iterable[Group], done: Container[Key] = ()) -> Iterator[Record]:
        """The records of all groups' samples under all rules, without those whose keys are `done`. Raises
        ValueError as `check`, and MemoryError with an estimate where a batch does not fit."""
        for group in groups:
            for questions in self._batches(group, done):
                for question in questions:
                    self._check(question)
                yield from self._answer(group, questions, done)

    def _batches(self, group: Group, done: Container[Key]) -> Iterator[list[Question]]:
        """Samples that lack a record, those of similar lengths together. Answers of different lengths are
        apart where the longest one behind the longest prompt would exceed the model's positions."""
        indices = [i for i in group.indices if any(group.key(i, rule) not in done for rule in self.rules)]
        if not group.task.lengths:
            indices.sort(key=lambda index: self._count(group, index))
        for start in range(0, len(indices), self.batch):
            questions = [self._question(group, index) for index in indices[start : start + self.batch]]
            longest = max(len(question.ids) for question in questions)
            if longest + max(map(_new_tokens, questions)) <= self.model.config.max_positions:
                yield questions
            else:
                questions.sort(key=_new_tokens)
                yield from (list(alike) for _, alike in groupby(questions, key=_new_tokens))

    def _question(self, group: Group, index: int) -> Question:
        sample = group.task.sample(group.length, index)
        ids = self.prompting.encode(sample.prompt, sample.answer_prefix, chat=sample.chat)
        question = Question(sample, ids)
        self._tokens[group.task.name, group.length, index] = len(question.ids)
        return question

    def _count(self, group: Group, index: int) -> int:
        """Tokens of a prompt. Prompts are made again when their turn comes: all of them at once may be
        large."""
        key = (group.task.name, group.length, index)
        return self._tokens[key] if key in self._tokens else len(self._question(group, index).ids)

    def _check(self, question: Question) -> None:
        config, lengths = self.model.config, [len(question.ids)]
        with _naming(question):
            check_positions(lengths, question.sample.max_new_tokens, config.max_positions)
            for rule in self.rules:
                with _naming(rule):
                    Budgets(rule.eviction, lengths, config.num_layers)

    def _answer(self, group: Group, questions: list[Question], done: Container[Key]) -> Iterator[Record]:
        """A batch, rule after rule."""
        filled = questions + [questions[0]] * ((self.compile is not False) * (self.batch - len(questions)))
        prompts, limits = [question.ids for question in filled], [*map(_new_tokens, filled)]
        new_tokens = max(limits)
        # It costs a look at every token, on a GPU too.
        stop = None if min(limits) == new_tokens else lambda row, tokens: len(tokens) >= limits[row]
        with _sizing("the full cache", prompts):
            self._reader.prefill(prompts, max_new_tokens=new_tokens)
        prefill = self._reader.stats.seconds.prefill
        for rule in self.rules:
            rows = [(n, q) for n, q in enumerate(questions) if group.key(q.sample.index, rule) not in done]
            if not rows:
                continue
            decoder = self._decoder if rule.eviction else self._reader
            with _naming(rule), _sizing(rule, prompts):
                if rule.eviction:
                    decoder.use(rule.eviction)
                    decoder.take_prompt(self._reader, max_new_tokens=new_tokens)
                out = decoder.decode(new_tokens, stop=stop)
            spent = out.stats.seconds
            seconds = {"prefill": prefill} | {name: getattr(spent, name) for name in SECONDS[1:]}
            seconds = {name: value / len(questions) for name, value in seconds.items()}
            for row, question in rows:
                yield self._record(group.task, question, rule, out, row, seconds)

    def _record(
        self, task: Task, question: Question, rule: Rule, out: Generation, row: int, seconds: dict[str, float]
    ) -> Record:
        sample, tokens, stats = question.sample, out.tokens[row], out.stats
        eos_ids = self.model.config.eos_token_ids
        prediction = decode_answer(self.prompting.tokenizer, tokens, eos_ids)
        return Record(
            *(sample.task, sample.length, sample.index, *rule.key),
            prompt_sha256=prompt_hash(question.ids),
            prompt_tokens=len(question.ids),
            bos_count=self.prompting.count_bos(question.ids),
            budget=stats.budgets[row],
            kept_tokens=stats.kept_tokens[row],
            cache_bytes=self.model.tp.size * stats.cache_bytes // stats.batch,
            prediction=prediction,
            references=list(sample.references),
            score=task.score(prediction, sample) if prediction.strip() else 0.0,
            answer_tokens=len(tokens),
            finish_reason="eos" if tokens[-1] in eos_ids else "length",
            seconds=seconds,
            facts=sample.facts,
        )


def _ample(group: Group) -> bool:
    """Whether a task with prompts of any length can make the group's first one of a quarter of its length.
    Then it can make all: what they need differs, but by less than that."""
    if group.length is None:
        return False
    try:
        for index in group.indices[:1]:
            group.task.sample(group.length // 4, index)
    except ValueError:
        return False
    return True


def _new_tokens(question: Question) -> int:
    return question.sample.max_new_tokens


@contextlib.contextmanager
def _naming(what: object) -> Iterator[None]:
    """Say of a ValueError what it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


@contextlib.contextmanager
def _sizing(what: object, prompts: list[list[int]]) -> Iterator[None]:
    """Say of a MemoryError which batch it is about, and what helps."""
    try:
        yield
    except MemoryError as error:
        batch = f"{what}, {len(prompts)} prompts of at most {max(map(len, prompts)):,} tokens"
        raise MemoryError(f"{batch}: {error}; a smaller --batch takes less") from error
