"""The page of `scripts/trace.py`: its structure, that no text gets out of its place, and what is cut."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inertiakv import EvictionConfig
from inertiakv.evals.diagnostics import RowTrace
from inertiakv.scripts.tracing import page
from inertiakv.scripts.tracing.page import TracedRun, nearest, picture
from inertiakv.scripts.tracing.runs import Run
from inertiakv.scripts.tracing.text import LEVELS, Token, TracedText

NAN = math.nan
PRINTABLE = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t"), max_size=20)
VOID = {"meta", "input", "br"}
CHURN = {"raw": {"step": [], "churn": []}, "ema": {"step": [2, 3], "churn": [0.5, 0.25]}}


class Shown(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        """Of each <pre>, without the first line break, which HTML drops."""
        self.headings: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open
        self.texts = [shown.removeprefix("\n") for shown in self.texts]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        for name, places in (("pre", self.texts), ("h2", self.headings), ("script", self.scripts)):
            if tag == name:
                places.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("li", "p", "polyline"):
            assert self.open[-1] == tag, (self.open, tag)
        self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        for name, places in (("pre", self.texts), ("h2", self.headings), ("script", self.scripts)):
            if name in self.open:
                places[-1] += data

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]

    @property
    def tokens(self) -> list[dict[str, str | None]]:
        return [span for span in self.named("span") if "title" in span]


def traced(*tokens: Token, title: str = "prompt 1, single", steps: int = 4) -> TracedRun:
    return TracedRun(TracedText(title, list(tokens)), ["90.", "909"], steps, CHURN)


def test_the_page_shows_any_text_as_it_is() -> None:
    hostile = "</pre><script>alert('\"&amp;')</script> {0} %s @data@ \\1"
    tokens = (Token("\n", 1.0, None), Token(hostile, 0.5, 3), Token("&lt;", 2.0, None, since=2))
    shown = Shown(page.page([traced(*tokens, title="<b>'x'</b>, single")]))
    assert shown.texts == ["\n" + hostile + "&lt;"]
    assert shown.headings == ["<b>'x'</b>, single: 2 of 3 tokens are kept"]
    assert len(shown.scripts) == 2
    first, second, third = shown.tokens
    assert first == {"class": f"u{LEVELS // 3} s7", "title": "position 0: stayed 4 of 4 steps, utility 1"}
    assert second["title"] == "position 1: stayed 2 of 4 steps, utility 0.5, evicted at step 3"
    assert (second["class"], second["data-gone"]) == ("u0 s3 e", "3")
    assert third["data-since"] == "2"


@given(PRINTABLE)
def test_no_text_gets_out_of_its_place(words: str) -> None:
    tokens = (Token(words, 0.0, None), Token("end", 1.0, 2))
    shown = Shown(page.page([traced(*tokens, title=words)]))
    assert shown.texts == [f"{words}end"]
    assert len(shown.tokens) == 2


def test_nothing_is_fetched_from_elsewhere() -> None:
    made = page.page([traced(Token("http", 1.0, None))] * 2)
    assert "://" not in made
    assert "url(" not in made
    shown = Shown(made)
    assert not {tag for tag, _ in shown.tags} & {"link", "img", "iframe", "object", "base", "form"}
    assert all(not {"src", "href", "srcset"} & set(attributes) for _, attributes in shown.tags)
    policy = next(meta["content"] for meta in shown.named("meta") if "http-equiv" in meta)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_what_is_on_the_page() -> None:
    """A slider with a name for each run, its numbers by step, a picture, a chart, and a legend."""
    tokens = (Token("a", 1.0, None), Token("b", 0.5, 1), Token("c", 0.4, 3), Token("d", 2.0, None, since=2))
    shown = Shown(page.page([traced(*tokens), traced(*tokens)]))
    labels = {label["for"] for label in shown.named("label") if "for" in label}
    sliders = [slider for slider in shown.named("input") if slider["type"] == "range"]
    assert {slider["id"] for slider in sliders} == labels
    assert [(slider["min"], slider["max"], slider["value"]) for slider in sliders] == [("0", "4", "4")] * 2
    data = json.loads(shown.scripts[0])
    expected = {"steps": 4, "kept": [3, 2, 3, 2, 2], "total": [3, 3, 4, 4, 4], "picture": ["90.", "909"]}
    assert data == [expected] * 2
    assert len(shown.named("canvas")) == len(shown.named("svg")) == 2
    assert [line["class"] for line in shown.named("polyline")] == ["ema", "ema"]
    assert shown.named("polyline")[0]["points"] == "300.0,2.0 450.0,60.0"
    assert {radio["value"] for radio in shown.named("input") if radio["type"] == "radio"} == {
        "stayed",
        "utility",
    }


def test_a_picture_has_a_row_a_step_and_a_share_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    utility_TP = torch.tensor([[1.0, 3.0, 2.0, NAN], [NAN, 3.0, 2.0, 1.0]])
    nothing_TP = torch.zeros_like(utility_TP, dtype=torch.bool)
    trace = RowTrace(utility_TP, utility_TP[:, None] * NAN, nothing_TP, torch.tensor([2, 3]))
    run = Run(EvictionConfig(budget=2), 2, [7, 8, 9], trace)
    assert picture(run) == ["099.", "0990"]
    monkeypatch.setattr(page, "MOST_COLUMNS", 2)
    assert picture(run) == ["59", "55"]
    monkeypatch.setattr(page, "MOST_ROWS", 1)
    assert picture(run) == ["59"]


def test_a_long_text_is_cut_far_from_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [Token(f"{n} ", 0.0, None if n == 5 else 1) for n in range(12)]
    assert nearest(tokens, 3) == {4, 5, 6}
    assert nearest([Token("x", 0.0, 1)] * 4, 2) == {2, 3}
    monkeypatch.setattr(page, "MOST_TOKENS", 5)
    monkeypatch.setattr(page, "MOST_RUNS", 1)
    made = page.page([traced(*tokens)] * 3)
    shown = Shown(made)
    assert shown.texts == ["[3 tokens are not shown]3 4 5 6 7 [4 tokens are not shown]"]
    assert "2 more runs are not on this page" in made
