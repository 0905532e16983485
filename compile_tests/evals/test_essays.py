"""Essays: where they come from, how they are cut into sentences. No network."""

import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inertiakv.evals import data_files
from inertiakv.evals.essays import BUNDLED, HUB, Essays, load_essays, split_sentences


def test_the_bundled_text() -> None:
    essays = load_essays()
    assert essays.name == "bundled"
    assert essays.sha256 == hashlib.sha256(BUNDLED.read_bytes()).hexdigest()
    assert len(essays.words) >= 6000
    assert essays.text.replace("\n", "").isprintable()
    assert not re.search(r"\d|magic|VAR\b", essays.text)
    paragraphs = [line for line in essays.text.split("\n") if line]
    assert all(paragraph[-1] in ".!?" for paragraph in paragraphs)
    sentences = split_sentences(essays.take(len(essays.words)))
    assert len(sentences) > 300
    repeated = {sentence for sentence, times in Counter(sentences).items() if times > 1}
    assert not {sentence for sentence in repeated if len(sentence.split()) > 4}


def test_take_begins_again_at_the_end() -> None:
    essays = Essays("three", "One\n two.  Three")
    assert essays.take(2) == "One two."
    assert essays.take(7) == "One two. Three One two. Three One"


def test_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Last.")
    (tmp_path / "d.json").write_text(json.dumps({"text": "Graham."}))
    assert load_essays(str(tmp_path / "b.txt")).text == "Last."
    assert load_essays(str(tmp_path / "d.json")).text == "Graham."
    assert load_essays(str(tmp_path / "b.txt")).sha256 == hashlib.sha256(b"Last.").hexdigest()


def test_what_is_no_essay(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: neither a file nor the word hub"):
        load_essays(str(tmp_path / "nowhere"))
    (file := tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} have no words"):
        load_essays(str(file))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", b"{}", "are not of the form"),
        ("a.json", b'["text"]', "are not of the form"),
        ("a.json", b'{"text": 5}', "are not of the form"),
        ("a.json", b"", "cannot be read: .*Expecting value"),
        ("a.txt", b"caf\xe9", "cannot be read: .*is not UTF-8 text"),
    ],
)
def test_files_that_are_no_essays(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (file := tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^the essays {re.escape(str(file))} {message}") as error:
        load_essays(str(file))
    assert "\n" not in str(error.value)


def test_no_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Here, but not asked for.")
    with pytest.raises(ValueError, match="the essays are a file or the word hub, got ''"):
        load_essays("")


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("", []),
        ("No end", ["No end"]),
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("He said “No.” Then (as ever) he left.) Yes", ["He said “No.”", "Then (as ever) he left.)", "Yes"]),
        ("Mr. Hill and Dr. Ash met J. R. Marsh. Yes", ["Mr. Hill and Dr. Ash met J. R. Marsh.", "Yes"]),
        ("It cost 3.50 then. 4 came.", ["It cost 3.50 then.", "4 came."]),
        ("Wait... what? yes. it is", ["Wait... what? yes. it is"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(st.text(alphabet="aB.!?\"'”) \n(Mr1", max_size=60))
def test_sentences_are_the_text(text: str) -> None:
    text = " ".join(text.split())
    assert " ".join(split_sentences(text)) == text


class Unreachable(Exception):
    pass


def test_the_hub_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def no_answer(*_: Any, **options: Any) -> None:
        assert options["timeout"] <= 10
        raise Unreachable("name not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", no_answer)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked without an answer"))
    with pytest.raises(ConnectionError, match=rf"{HUB} cannot be had .*Unreachable: name not known"):
        load_essays("hub")


def test_the_hub_offline_is_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def cached(*where: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((*where, options))
        return [{"text": "One."}, {"text": "Two."}]

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(datasets, "load_dataset", cached)
    essays = load_essays("hub")
    assert (essays.name, essays.text) == (f"hub:{HUB}", "One.\nTwo.")
    assert asked == [(HUB, None, {"split": "train"})]


def test_the_hub_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="owner/data needs the package datasets: pip install"):
        data_files.hub_rows("owner/data", None, "train")
