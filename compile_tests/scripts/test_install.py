"""What a wheel holds, and the command `inertiakv`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from inertiakv.scripts.cli import main as console
from inertiakv.scripts.cli import program

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("inertiakv", "models", "evals", "scripts", "benchmarks")


def build(kind: str, source: Path, out: Path) -> Path:
    """Call setuptools as pip does. Returns the archive."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, out], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = (file for file in out.iterdir() if file.is_file())
    return archive


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a wheel, made from an sdist of a copy of the checkout, as in site-packages."""
    folder = tmp_path_factory.mktemp("build")
    source, sdist, wheel, installed = (folder / name for name in ("source", "sdist", "wheel", "installed"))
    for made in (source, sdist, wheel):
        made.mkdir()
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("sdist", source, sdist)) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("inertiakv-*")
    with zipfile.ZipFile(build("wheel", unpacked, wheel)) as archive:
        archive.extractall(installed)
    return installed


def test_a_wheel_has_one_package_with_everything_in_it(installed: Path) -> None:
    assert [path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")] == [
        "inertiakv"
    ]
    for name in ("models", "evals", "scripts"):
        expected = {file.relative_to(ROOT) for file in (ROOT / name).rglob("*.py")}
        found = (installed / "inertiakv" / name).rglob("*.py")
        assert {file.relative_to(installed / "inertiakv") for file in found} == expected
    for name in ("py.typed", "evals/data/essays.txt", "scripts/demo/lighthouse.txt"):
        assert (installed / "inertiakv" / name).is_file()
    assert list((installed / "inertiakv" / "benchmarks").glob("*.json"))


@pytest.mark.slow
def test_an_installed_command(installed: Path, tmp_path: Path) -> None:
    """`inertiakv plan` reads measurements that come with the package."""
    (entry,) = installed.glob("*.dist-info/entry_points.txt")
    assert "inertiakv = inertiakv.scripts.cli.main:main" in entry.read_text()
    code = (
        "import sys; from inertiakv.scripts.cli import main; import inertiakv.models\n"
        "print(main.__file__, file=sys.stderr); sys.exit(main.main())"
    )
    command = [sys.executable, "-c", code, "plan", "--device", "h100", "--json"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(str(installed))
    assert '"h100"' in done.stdout


def test_every_command_is_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, summary in console.COMMANDS.items():
        assert f"  {name:<14}{summary}\n" in text
        script = ROOT / "scripts" / f"{name.replace('-', '_')}.py"
        assert "\ndef main(" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("argv, problem", [(["encode"], "no command 'encode'"), ([], "no command")])
def test_unknown_commands(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main(argv) == 2
    assert capsys.readouterr().err == f"error: {problem}; choose from {', '.join(console.COMMANDS)}\n"


def test_a_command_gets_the_arguments_behind_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["inertiakv", "report"])
    with pytest.raises(SystemExit) as ended:
        console.main(["report", "--help"])
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage: inertiakv report ")


def test_a_missing_extra_is_named_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rouge", "datasets", "torchao"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["inertiakv"])
    assert console.main(["eval", "--tasks", "longbench", "--model", "nowhere"]) == 2
    expected = "error: this needs rouge and datasets: pip install 'inertiakv[eval]'\n"
    assert capsys.readouterr().err == expected
    with pytest.raises(ValueError, match=r"needs torchao: pip install 'inertiakv\[quant\]'"):
        program.require("quant", "torchao", "torch")
