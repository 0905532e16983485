"""scripts/train_scorer.py on a tiny random model: what it learns, every way to use it wrongly, and what it
measures by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.models.reference import GrowingCache
from compile_tests.scripts.test_decode_cli import Result
from compile_tests.tiny import random_prompt, tiny_model
from compile_tests.tiny_chat import tiny_chat
from inertiakv.scoring.learned import load_scorer
from inertiakv.scripts import train_scorer
from inertiakv.scripts.training import distill
from inertiakv.scripts.training.distill import ObservedPass, agreement, log_attention

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "scripts" / "demo" / "lighthouse.txt").read_text("utf-8")[:1600]
SMALL = ("--length", 64, "--queries", 16, "--steps", 30)

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cli(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    (tmp_path / "light.txt").write_text(TEXT, encoding="utf-8")

    def run(*argv: object, out: str = "form.safetensors", text: object = tmp_path / "light.txt") -> Result:
        options = ["--out", str(tmp_path / out), *(["--text", str(text)] if text is not None else [])]
        for name, value in (("--model", folder), ("--device", "cpu")):
            options += [name, str(value)] if name not in argv else []
        capsys.readouterr()
        code = train_scorer.main([*map(str, argv), *options])
        return Result(code, *capsys.readouterr())

    return run


# What comes of it
# ----------------------------------------------------------------------------------------------------------


def test_it_learns_and_says_what_it_did(cli: Cli, folder: Path, tmp_path: Path) -> None:
    assert cli(*SMALL, "--steps", 60).code == 0
    settings = json.loads((tmp_path / "form.json").read_text("utf-8"))
    before, after = settings["held_out"]["untrained"], settings["held_out"]["trained"]
    assert abs(before["spearman"]) < 0.2
    assert after["spearman"] > before["spearman"] + 0.2
    assert after["jaccard"] > before["jaccard"]
    assert (settings["pieces"], settings["held_out"]["pieces"]) == (25, 2)
    assert settings["sizes"]["rank"] == 64
    assert [text["name"] for text in settings["text"]] == ["light.txt"]
    assert str(tmp_path) not in json.dumps(settings)
    assert str(folder.parent) not in json.dumps(settings)
    scorer = load_scorer(
        tmp_path / "form.safetensors", train_scorer.load_model(folder, device="cpu")[0].config
    )
    assert torch.equal(scorer.wk, scorer.wk.half().float())


def test_a_table_for_people(cli: Cli, tmp_path: Path) -> None:
    result = cli(*SMALL, "--steps", 11)
    assert result.code == 0, result.err
    _, spearman, jaccard = (line.split()[-1] for line in result.out.splitlines())
    trained = json.loads((tmp_path / "form.json").read_text("utf-8"))["held_out"]["trained"]
    assert (spearman, jaccard) == (f"{trained['spearman']:.3f}", f"{trained['jaccard']:.3f}")
    assert re.findall(r"step (\d+) of 11: loss ", result.err) == ["10", "11"]


def test_the_seed_decides(cli: Cli, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert cli(*SMALL, "--steps", 2, "--seed", seed, out=f"{name}.safetensors").code == 0
    a, b, c = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "abc")
    assert a == b != c


# What can be wrong
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, error",
    [
        (("--length", 31), "argument --length: must be at least 32, got 31"),
        (("--steps", 0), "argument --steps: must be at least 1, got 0"),
        (("--queries", 0), "argument --queries: must be at least 1, got 0"),
        (("--lr", 0), "--lr must be a number above 0, got 0.0"),
        (("--lr", "nan"), "--lr must be a number above 0, got nan"),
        (("--device", "nowhere"), "device 'nowhere' cannot be used: "),
        (("--sepps", 3), "--sepps"),
    ],
)
def test_options_that_cannot_be(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, argv: tuple[Any, ...], error: str
) -> None:
    monkeypatch.setattr(train_scorer, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    assert error in cli(*argv).error


@pytest.mark.parametrize(
    "options, error",
    [
        ({"text": None}, "no text: give --text FILE..., some hundred kilobytes of it"),
        ({"text": "gone.txt"}, "{tmp}/gone.txt: No such file or directory"),
        ({"text": "latin.txt"}, "{tmp}/latin.txt is not UTF-8 text (byte 3)"),
        ({"text": "short.txt"}, "the text is enough for 1 pieces of 64 tokens, 2 are needed"),
        ({"out": "form.pt"}, "a scorer's file ends in .safetensors, got "),
        ({"out": "no/form.safetensors"}, "--out {tmp}/no/form.safetensors: there is no folder {tmp}/no"),
    ],
)
def test_files_that_cannot_be(cli: Cli, tmp_path: Path, options: dict[str, Any], error: str) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text(TEXT[:100])
    if options.get("text"):
        options = {"text": tmp_path / options["text"]}
    assert cli(*SMALL, **options).error.startswith(error.format(tmp=tmp_path))


def test_models_that_do_not_fit(cli: Cli, tmp_path: Path) -> None:
    assert cli("--length", 5000).error == "--length 5,000 is more than the model's 4,096 positions"
    assert cli("--model", tmp_path / "nowhere").error.startswith("no model ")


# What it is made of
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [None, (7, None)], ids=["full", "sliding"])
def test_an_observed_pass_attends_as_the_model_does_and_sees_its_attention(windows: Any) -> None:
    model = tiny_model(windows=windows)
    tokens_BT, positions_BT = torch.tensor([random_prompt(20)]), torch.arange(20)[None]
    seen: list[tuple[Tensor, ...]] = []
    position_Q = torch.tensor([3, 19, 11])

    def observe(q_BHTD: Tensor, k_BGTD: Tensor, window: int | None, scale: float) -> None:
        q_QHD = q_BHTD[0, :, position_Q].transpose(0, 1)
        found_QN = log_attention(q_QHD, k_BGTD[0], position_Q, window, scale)
        seen.append((found_QN, by_the_letter(q_QHD, k_BGTD[0], position_Q, window, scale)))

    with torch.no_grad():
        hidden_BTE = model(tokens_BT, positions_BT, ObservedPass(observe))
        cache = GrowingCache()
        cache.positions = positions_BT
        torch.testing.assert_close(hidden_BTE, model(tokens_BT, positions_BT, cache))
    assert len(seen) == 2
    for found_QN, expected_QN in seen:
        torch.testing.assert_close(found_QN.exp(), expected_QN)
        assert torch.equal(found_QN == -torch.inf, expected_QN == 0)


def by_the_letter(
    q_QHD: Tensor, k_GND: Tensor, position_Q: Tensor, window: int | None, scale: float
) -> Tensor:
    """Mean over heads of softmax, query by query and head by head."""
    weights_QN = torch.zeros(len(position_Q), k_GND.shape[1], dtype=k_GND.dtype)
    heads, group = q_QHD.shape[1], q_QHD.shape[1] // len(k_GND)
    for row, position in enumerate(position_Q.tolist()):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            logits = k_GND[head // group, first : position + 1] @ q_QHD[row, head] * scale
            weights_QN[row, first : position + 1] += logits.softmax(0) / heads
    return weights_QN


def test_spearman_and_jaccard_of_known_rankings() -> None:
    target_QN = torch.arange(20.0).log_softmax(-1)[None]
    order = torch.tensor([[1, 0, *range(2, 20)]]).float()  # one swap: 1 - 6 * 2 / (20 * 399)
    assert agreement(target_QN * 3 + 1, target_QN) == pytest.approx((1, 1))
    assert agreement(-target_QN, target_QN) == pytest.approx((-1, 0))
    # The best two are not touched.
    assert agreement(order, target_QN) == pytest.approx((1 - 12 / (20 * 399), 1))
    one_of_two = target_QN.clone()
    one_of_two[0, 18] = -99.0
    assert agreement(one_of_two, target_QN)[1] == pytest.approx(1 / 3)


def test_what_a_query_does_not_see_counts_for_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    score_QN, target_QN = torch.randn(2, 1, 30, generator=random)
    target_QN = target_QN.log_softmax(-1)
    unseen = torch.full((1, 5), -torch.inf)
    wider = (torch.cat((score_QN, torch.full((1, 5), 9.0)), -1), torch.cat((target_QN, unseen), -1))
    assert agreement(*wider) == pytest.approx(agreement(score_QN, target_QN))
    assert distill.loss(*wider).item() == pytest.approx(distill.loss(score_QN, target_QN).item())


def test_the_loss_by_hand_and_its_gradient() -> None:
    target_QN = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    # Softmax 1/4, 1/2, 1/4: gaps log 2, -log 2, 0, whose mean is 0. MSE 2/3 log(2)^2, KL log(2) / 4.
    score_QN = torch.tensor([[0.25, 0.5, 0.25, 0.9]]).log().requires_grad_()
    value = distill.loss(score_QN, target_QN)
    log_2 = 0.6931472
    assert value.item() == pytest.approx(2 / 3 * log_2**2 + 0.1 * log_2 / 4, rel=1e-5)
    value.backward()
    assert score_QN.grad is not None
    assert score_QN.grad.isfinite().all()
    assert score_QN.grad[0, 3] == 0
    perfect_QN = torch.where(target_QN > -torch.inf, target_QN + 7, 0.0)
    assert distill.loss(perfect_QN, target_QN).item() == pytest.approx(0, abs=1e-9)
