"""Machines without a compiler."""

import logging
from pathlib import Path

import pytest
import torch

from compile_tests.tiny import decoder_for, random_prompt, tiny_model
from inertiakv import Decoder, EvictionConfig
from inertiakv.compiling import toolchain

MODEL = tiny_model(3, dtype=torch.float32)
RULE = EvictionConfig(compression=0.5)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("nothing_installed")
def test_without_a_compiler_steps_run_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "inertiakv"):
        decoder = Decoder(MODEL, RULE)
    (record,) = caplog.records
    assert "run uncompiled" in record.message
    assert "apt install g++" in record.message
    expected = decoder_for(MODEL, RULE).generate(random_prompt(30), 4).tokens
    assert decoder.generate(random_prompt(30), 4).tokens == expected


@pytest.mark.usefixtures("nothing_installed")
def test_a_compiler_that_is_asked_for_has_to_be_there() -> None:
    with pytest.raises(ValueError, match=r"cannot be compiled: there is no C\+\+ compiler"):
        Decoder(MODEL, RULE, compile=True)
    assert toolchain.missing_toolchain(torch.device("cuda")) is not None


def test_headers_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "headers of Python" in str(toolchain.missing_toolchain(torch.device("cpu")))
