"""scripts/eval.py on a tiny random model."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest

from compile_tests.evals.fake_benchmarks import BENCHMARKS, ESSAYS
from compile_tests.scripts.eval.folders import ARGV, Cli
from compile_tests.scripts.test_decode_cli import Result
from compile_tests.tiny_chat import tiny_chat
from inertiakv.evals import registry
from inertiakv.scripts import decode
from inertiakv.scripts import eval as script


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat(tmp_path_factory.mktemp("model"), max_positions=512)


@pytest.fixture(scope="session")
def cli(folder: Path) -> Cli:
    def run(*argv: object, model: Path | str = folder, compile: bool = False) -> Result:
        options = ["--model", str(model), "--dtype", "float64", "--compile" if compile else "--no-compile"]
        options += [] if "--device" in argv else ["--device", "cpu"]
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "BENCHMARKS", BENCHMARKS)
            patch.setattr(script, "load_essays", lambda source: ESSAYS)
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = script.main([*map(str, argv), *options])
        return Result(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def whole(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("run") / "deep" / "out"
    result = cli(*ARGV, "--out", out)
    assert result.code == 0, result.err
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The same, to go on with."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong by itself must be found before the model is loaded."""
    monkeypatch.setattr(decode, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
