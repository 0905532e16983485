"""What several processes of torchrun say is said once."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from inertiakv.models import extras
from inertiakv.scripts.cli import program

Says = Callable[[Exception], str]


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun has for its processes: a store, and where it is."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    yield
    del store


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    def of(error: Exception) -> str:
        def fail() -> None:
            raise error

        assert program.run(fail) == 2
        return capsys.readouterr().err

    return of


@pytest.mark.usefixtures("torchrun")
def test_each_error_is_said_once(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    assert says(ValueError("no\nsuch thing")) == "error: no such thing\n"
    assert says(ValueError("no such thing")) == ""
    assert says(MemoryError("too large here")) == "error: too large here\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert says(ValueError("no such thing")) == "error: no such thing\n"


@pytest.mark.usefixtures("torchrun")
def test_who_has_lost_another_says_so_where_nobody_knows_more(
    says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert says(ConnectionError("rank 0 has lost another one")) == "error: rank 0 has lost another one\n"
    assert says(ConnectionError("rank 2 has lost another one")) == ""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    says(ValueError("no such thing"))
    assert says(ConnectionError("rank 0 has lost another one")) == ""


def test_without_torchrun_or_its_store_all_is_said(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [says(ValueError("no")) for _ in range(2)] == ["error: no\n"] * 2
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert says(ValueError("no")) == "error: no\n"


def test_only_what_concerns_a_user_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Other libraries' notes to programmers are left out; their errors, and what we warn of, are not."""
    logger = logging.getLogger("torchao")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    level = logger.level

    def talk() -> None:
        logger.warning("no kernels")
        logger.error("broken")
        logging.getLogger("inertiakv").warning("take care")
        with warnings.catch_warnings(record=True) as caught:
            for category, module in (
                (DeprecationWarning, "torch.jit._script"),
                (UserWarning, "torch.cuda"),
                (DeprecationWarning, "inertiakv.decoder"),
            ):
                warnings.warn_explicit("old", category, "file", 1, module)
        assert [warning.category for warning in caught] == [UserWarning, DeprecationWarning]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert program.run(talk) == 0
    logger.removeHandler(handler)
    assert capsys.readouterr().err == "broken\nWARNING: take care\n"
    assert logger.level == level


def test_an_extra_is_installed_from_where_the_project_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "distribution", lambda name: None)
    assert extras.install("gguf") == "pip install 'inertiakv[gguf]'"

    def not_there(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", not_there)
    checkout = Path(__file__).resolve().parents[2]
    assert extras.install("gguf") == f"pip install '{checkout}[gguf]'"
