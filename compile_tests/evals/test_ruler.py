"""RULER: what is in a prompt, how often, where, and how long it all is."""

import re
import sys
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from compile_tests.examples import share
from compile_tests.tiny_chat import BOS, tiny_tokenizer
from inertiakv.evals.essays import Essays, load_essays
from inertiakv.evals.ruler import OTHERS, TASKS, make, niah, words
from inertiakv.evals.ruler.generated import NOISE, Generated
from inertiakv.evals.ruler.niah import NEEDLES
from inertiakv.evals.ruler.templates import COMMON_WORDS, FREQUENT_WORDS, NIAH, NIAH_ONE, VARIABLES
from inertiakv.evals.ruler.variables import VariableTracking
from inertiakv.evals.task import Prompting, Sample

pytest.importorskip("wonderwords")

ESSAYS = load_essays()
MADE = (*NEEDLES, *OTHERS)
LENGTHS = st.integers(512, 6000)
SEEDS = st.integers(0, 3)
INDICES = st.integers(0, 499)


def count_words(prompt: str, answer_prefix: str) -> int:
    """A tokenizer of one token a word, and a chat template of seven."""
    return len(prompt.split()) + len(answer_prefix.split()) + 7


def new(name: str, seed: int = 42, essays: Essays = ESSAYS) -> Generated:
    return make(f"ruler:{name}", count_words, seed, essays)


def made(name: str, seed: int, length: int, index: int) -> Sample:
    """The sample; where it needs more tokens this is no example."""
    try:
        return new(name, seed).sample(length, index)
    except ValueError as error:
        assume(f"ruler:{name}, sample {index}: a length of {length} tokens is too short" not in str(error))
        raise


def used(sample: Sample) -> int:
    return count_words(sample.prompt, sample.answer_prefix) + sample.max_new_tokens


# Every task.


def test_names() -> None:
    names = (
        *("niah_single_1", "niah_single_2", "niah_single_3"),
        *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    )
    assert tuple(f"ruler:{name}" for name in names) == TASKS


@pytest.mark.parametrize("name", MADE)
@share(2)
@given(seed=SEEDS, length=LENGTHS, index=INDICES)
def test_lengths(name: str, seed: int, length: int, index: int) -> None:
    sample = made(name, seed, length, index)
    assert 0.95 * length <= used(sample) <= length
    assert (sample.task, sample.length, sample.index) == (f"ruler:{name}", length, index)
    assert re.match(r" \S", sample.answer_prefix)
    assert sample.facts["units"] > 0
    essay = name in NEEDLES and NEEDLES[name].haystack == "essay"
    assert sample.facts.get("essays") == ("bundled" if essay else None)


@pytest.mark.parametrize("name", MADE)
def test_a_sample_depends_on_its_place_alone(name: str) -> None:
    task = new(name)
    assert task.lengths
    assert task.count(1024) is None
    samples = [task.sample(1024, index) for index in (17, 3, 17)]
    assert samples[0] == samples[2] == new(name).sample(1024, 17)
    different = [*samples[:2], new(name, seed=43).sample(1024, 17), task.sample(1025, 17)]
    assert len({sample.prompt for sample in different}) == 4
    assert len({sample.references for sample in different}) == 4


@pytest.mark.parametrize("name", MADE)
def test_only_the_haystack_grows(name: str) -> None:
    short, long = (new(name).sample(length, 0) for length in (4096, 8192))
    assert len(short.references) == len(long.references)
    assert short.max_new_tokens == long.max_new_tokens
    assert short.facts["units"] < long.facts["units"]


@pytest.mark.parametrize("name", ["vt", "cwe", "fwe", "niah_multiquery"])
def test_too_short(name: str) -> None:
    with pytest.raises(ValueError, match="a length of 90 tokens is too short") as error:
        new(name).sample(90, 0)
    needed = int(str(error.value).split("at least ")[1].split()[0])
    # Another length draws other words, some of which are two.
    with pytest.raises(ValueError, match="too short"):
        new(name).sample(needed - 10, 0)
    assert used(new(name).sample(needed + 10, 0)) <= needed + 10


@pytest.mark.parametrize("kind", ["llama", "qwen"])
@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_3", "vt", "cwe", "fwe"])
def test_with_a_chat_template_and_bos(name: str, kind: str) -> None:
    prompting = Prompting(tiny_tokenizer(kind), "chat")
    sample = make(f"ruler:{name}", prompting.count, 42, ESSAYS).sample(12_000, 0)
    ids = prompting.encode(sample.prompt, sample.answer_prefix)
    assert 0.95 * 12_000 <= len(ids) + sample.max_new_tokens <= 12_000
    assert prompting.count_bos(ids) == (kind == "llama")
    text = prompting.tokenizer.decode(ids)
    assert text.endswith(sample.answer_prefix)
    assert text.startswith(BOS if kind == "llama" else "<|im_start|>user\n")


@pytest.mark.real
@pytest.mark.parametrize("name", MADE)
def test_with_a_real_tokenizer(name: str) -> None:
    from transformers import AutoTokenizer

    from inertiakv.models.hub import find_folder

    prompting = Prompting(AutoTokenizer.from_pretrained(find_folder("smollm2-135m")[0]), "chat")
    sample = make(f"ruler:{name}", prompting.count, 42, ESSAYS).sample(2048, 0)
    tokens = prompting.count(sample.prompt, sample.answer_prefix) + sample.max_new_tokens
    # A line with two uuids takes more than 60 tokens.
    assert 2048 - (80 if name == "niah_multikey_3" else 40) <= tokens <= 2048


# Needles.

LINE = re.compile(r"One of the special magic (numbers|uuids) for (\S+|\S+ \S+) is: ([0-9a-f-]+)\.")
NUMBER = re.compile(r"[1-9]\d{6}")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@pytest.mark.parametrize("name", NEEDLES)
@share(2)
@given(seed=SEEDS, length=LENGTHS, index=INDICES)
def test_every_needle_is_there_once(name: str, seed: int, length: int, index: int) -> None:
    needles = NEEDLES[name]
    sample = made(name, seed, length, index)
    lines = LINE.findall(sample.prompt)
    values = {value: key for _, key, value in lines}
    others = sample.facts["units"] if needles.haystack == "needle" else 0
    assert len(values) == len(lines) == needles.keys * needles.values + others
    assert {kind for kind, _, _ in lines} == {needles.value}
    pattern = NUMBER if needles.value == "numbers" else UUID
    assert all(pattern.fullmatch(value) for value in values)
    assert set(Counter(values.values()).values()) == {needles.values}

    asked = sample.facts["keys"]
    assert len(set(asked)) == needles.queries
    assert len(sample.references) == len(sample.facts["depths"]) == needles.queries * needles.values
    assert [values[value] for value in sample.references] == [
        key for key in asked for _ in range(needles.values)
    ]
    for value in sample.references:
        assert (sample.prompt + sample.answer_prefix).count(value) == 1
    question = sample.prompt.rsplit("\n", 1)[1]
    for key in asked:
        assert len(re.findall(rf"(?<![\w-]){re.escape(key)} is: ", sample.prompt)) == needles.values
        assert key in question
        assert key in sample.answer_prefix


@pytest.mark.parametrize("name", [name for name in NEEDLES if NEEDLES[name].haystack != "needle"])
@given(seed=SEEDS, length=st.integers(512, 2000), index=INDICES)
@share(5)
def test_the_haystack_is_whole_without_its_needles(name: str, seed: int, length: int, index: int) -> None:
    sample = made(name, seed, length, index)
    haystack = LINE.sub("", sample.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]).split()
    units = sample.facts["units"]
    if NEEDLES[name].haystack == "noise":
        assert haystack == NOISE.split() * units
    else:
        assert haystack == ESSAYS.take(units).split()


def test_chance_gives_no_key_or_value_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("words", "numbers"):
        monkeypatch.setitem(niah._RANDOM, kind, lambda rng: str(rng.randint(1_000_000, 1_000_200)))
    drawn = new("niah_multikey_2").draw(Random(0), 1024, 0, 90)
    pairs = LINE.findall(drawn.prompt)
    assert len({text for _, *pair in pairs for text in pair}) == 2 * 91


def test_a_long_haystack_repeats_its_essays() -> None:
    essays = Essays("mine", "A short text. It has two sentences.")
    sample = new("niah_single_2", essays=essays).sample(700, 0)
    assert sample.facts["essays"] == "mine"
    assert sample.prompt.count("A short text.") > 50
    assert 0.95 * 700 <= used(sample) <= 700


def test_keys_are_an_adjective_and_a_noun() -> None:
    adjectives, nouns = set(words.word_list("adjective")), set(words.word_list("noun"))
    rng = Random(0)
    for _ in range(50):
        pair = words.adjective_noun(rng)
        cuts = [match.start() for match in re.finditer("-", pair)]
        assert any(pair[:cut] in adjectives and pair[cut + 1 :] in nouns for cut in cuts)


def test_words_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    words.word_list.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords.assets", None)
    with pytest.raises(ImportError, match="package wonderwords: pip install 'inertiakv"):
        words.word_list("noun")


def test_templates_of_needles() -> None:
    assert NIAH.prompt == (
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will "
        "quiz you about the {kind} afterwards.\n{context}\n"
        "What are all the special magic {kind} for {query} mentioned in the provided text?"
    )
    assert NIAH.answer_prefix == " The special magic {kind} for {query} mentioned in the provided text are"
    assert NIAH_ONE.prompt == (
        "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
        "quiz you about the {kind} afterwards.\n{context}\n"
        "What is the special magic {kind} for {query} mentioned in the provided text?"
    )
    assert NIAH_ONE.answer_prefix == " The special magic {kind} for {query} mentioned in the provided text is"
    assert NIAH.max_new_tokens == NIAH_ONE.max_new_tokens == 128


def test_a_prompt_with_one_needle() -> None:
    drawn = new("niah_multikey_2").draw(Random(1), 1024, 0, 2)
    assert drawn.prompt == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will "
        "quiz you about the number afterwards.\n"
        "One of the special magic numbers for colorful-preparation is: 2058756.\n"
        "One of the special magic numbers for charming-normalisation is: 8541208.\n"
        "One of the special magic numbers for magenta-senior is: 7368886.\n"
        "What is the special magic number for colorful-preparation mentioned in the provided text?"
    )
    assert drawn.answer_prefix == (
        " The special magic number for colorful-preparation mentioned in the provided text is"
    )
    assert drawn.references == ("2058756",)


def test_a_question_for_four_needles() -> None:
    drawn = new("niah_multiquery").draw(Random(1), 1024, 0, 80)
    asked = "colorful-preparation, faint-cent, royal-infarction, and tasteful-marker"
    assert drawn.prompt.endswith(
        f"\nWhat are all the special magic numbers for {asked} mentioned in the provided text?"
    )
    assert drawn.answer_prefix == f" The special magic numbers for {asked} mentioned in the provided text are"
    assert drawn.prompt.startswith("Some special magic numbers are hidden within")


# Variables.

ASSIGNMENT = re.compile(r"^VAR ([A-Z]+) = (?:VAR )?(\w+) ?$", re.MULTILINE)


@share(2)
@given(seed=SEEDS, length=LENGTHS, index=INDICES)
def test_the_chain_leads_to_the_value(seed: int, length: int, index: int) -> None:
    sample = made("vt", seed, length, index)
    example, asked = sample.prompt.split("\n\nMemorize")
    for text, letters in (example, 3), (asked, 5):
        chain = ASSIGNMENT.findall(text)
        names = [name for name, _ in chain]
        assert len(set(names)) == 5
        assert {len(name) for name in names} == {letters}
        assert [value for _, value in chain[1:]] == names[:-1]
        value = chain[0][1]
        assert 10_000 <= int(value) <= 99_998
        assert f"that are assigned the value {value} in the text above." in text
    # These are of the question itself: each name but the last is also what another one is given.
    assert sample.references == tuple(names)
    counts = [len(re.findall(rf"\b{name}\b", sample.prompt)) for name in names]
    assert counts == [2, 2, 2, 2, 1]
    assert sample.answer_prefix.count(value) == 1
    assert sample.prompt.count(value) == 2
    assert asked.count(NOISE) == sample.facts["units"]
    assert sample.facts["depths"] == sorted(sample.facts["depths"])
    shown = ASSIGNMENT.findall(example)
    assert shown[0][1] != value
    assert example.endswith(", they are:  " + " ".join(name for name, _ in shown))
    # The example, without its answer and with the chat template, is as long as 500 tokens allow.
    assert 480 <= count_words(example.rsplit(":", 1)[0], "") <= 500


def test_an_example_of_five_lines_where_more_do_not_fit() -> None:
    task = VariableTracking("vt", lambda prompt, prefix: len(prompt + prefix), 42)
    sample = task.sample(4096, 0)
    assert sample.prompt.split("\n\nMemorize")[0].count(NOISE) == 5


def test_a_prompt_with_variables() -> None:
    assert VARIABLES.max_new_tokens == 30
    task = VariableTracking("vt", lambda prompt, prefix: len(prompt + prefix), 42)
    drawn = task.draw(Random(1), 4096, 0, 5)
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    question = "Question: Find all variables that are assigned the value {} in the text above."
    answer = (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
        "assgined the value {}, they are: "
    )
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"

    def chain(value: str, *names: str) -> str:
        links = [f"VAR {name} = VAR {before} \n" for before, name in pairwise(names)]
        return f"VAR {names[0]} = {value}\n{noise}" + noise.join(links) + noise

    shown, asked = "WTG MLQ UCA VLT ALS", "AOYJF KAFLM GGFLH AVOQE ZWDIS"
    assert drawn.prompt == (
        f"{intro}{chain('27611', *shown.split())}{question.format(27611)}{answer.format(27611)} {shown}\n\n"
        f"{intro}{chain('84606', *asked.split())}{question.format(84606)}"
    )
    assert drawn.answer_prefix == answer.format(84606)
    assert drawn.references == tuple(asked.split())


# Words.


def listed(text: str) -> list[str]:
    """The words of a numbered list, whose numbers must be right."""
    parts = re.split(r"(?:^| )(\d+)\. ", text)
    assert parts[1::2] == [str(number) for number in range(1, len(parts) // 2 + 1)]
    return parts[2::2]


@share(2)
@given(seed=SEEDS, length=st.integers(512, 9000), index=INDICES)
def test_ten_words_are_more_common(seed: int, length: int, index: int) -> None:
    sample = made("cwe", seed, length, index)
    before, after = COMMON_WORDS.prompt.split("{context}")
    example, asked = sample.prompt.split("\n" + before)
    asked = before + asked
    if length < 4096:
        expected = {example: (20, 3, 1), asked: (sample.facts["units"], 6, 1)}
    else:
        expected = {example: (40, 10, 3), asked: (sample.facts["units"], 30, 3)}
    for text, (different, often, seldom) in expected.items():
        counts = Counter(listed(text.removeprefix(before).split(after)[0]))
        assert len(counts) == different
        common = {word for word, count in counts.items() if count == often}
        assert len(common) == 10
        assert {count for word, count in counts.items() if word not in common} == {seldom}
        assert set(counts) <= set(words.all_words())
        if text == asked:
            assert set(sample.references) == common
        else:
            answer = text.split(COMMON_WORDS.answer_prefix + " ")[1]
            assert set(listed(answer)) == common


def test_common_words_end_where_there_are_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "all_words", lambda: [f"word{number}" for number in range(60)])
    sample = new("cwe").sample(4096, 0)
    assert sample.facts["units"] == 60
    assert used(sample) <= 4096


@share(2)
@given(seed=SEEDS, length=LENGTHS, index=INDICES)
def test_three_words_come_after_the_dots(seed: int, length: int, index: int) -> None:
    sample = made("fwe", seed, length, index)
    before, after = FREQUENT_WORDS.prompt.split("{context}")
    text = sample.prompt.removeprefix(before).removesuffix(after)
    ranked = Counter(text.split(" ")).most_common()
    assert ranked[0][0] == "..."
    assert {word for word, _ in ranked[1:4]} == set(sample.references)
    assert ranked[3][1] > ranked[4][1]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
    assert len(ranked) <= (length - 50) // 50
    units = sample.facts["units"]
    for rank, (_, count) in enumerate(ranked, start=1):
        assert count == int(units / rank**2 / 1.6449340668482264)


def test_the_fourth_word_is_more_frequent_than_the_fifth() -> None:
    task = new("fwe")
    least, _ = task.bounds(512, 0)

    def fourth_and_fifth(units: int) -> list[int]:
        before, after = FREQUENT_WORDS.prompt.split("{context}")
        prompt = task.draw(Random(0), 512, 0, units).prompt
        text = prompt.removeprefix(before).removesuffix(after)
        return [count for _, count in Counter(text.split(" ")).most_common(5)[3:]]

    for units in range(least, 400):
        fourth, fifth = fourth_and_fifth(units)
        assert fourth > fifth
    assert len(set(fourth_and_fifth(least - 1))) == 1


def test_templates_of_words() -> None:
    assert COMMON_WORDS.prompt == (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
        "ones that appear most often.\n{context}\n"
        "Question: What are the 10 most common words in the above list?"
    )
    assert COMMON_WORDS.answer_prefix == " Answer: The top 10 words that appear most often in the list are:"
    assert COMMON_WORDS.max_new_tokens == 120
    assert FREQUENT_WORDS.prompt == (
        "Read the following coded text and track the frequency of each coded word. Find the three most "
        "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore "
        "the dots '....'. What are the three most frequently appeared words in the above coded text?"
    )
    assert FREQUENT_WORDS.answer_prefix == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    assert FREQUENT_WORDS.max_new_tokens == 50


@pytest.mark.parametrize("name", MADE)
def test_scores_count_every_reference(name: str) -> None:
    task = new(name)
    sample = task.sample(1024, 0)
    assert task.metric == "string_match_all"
    assert task.score(" ".join(sample.references).upper(), sample) == 1
    assert task.score("", sample) == 0
    part = task.score(sample.references[-1], sample)
    assert part >= 1 / len(sample.references)
    assert part < 1 or len(sample.references) == 1
