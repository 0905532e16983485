"""The README is true: its table is the code's, its Python runs, its commands are understood."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor

import inertiakv
import inertiakv.models as models
from compile_tests.tiny_chat import tiny_chat
from inertiakv import POLICIES, Decoder
from inertiakv.evals.rules import choose_rules
from inertiakv.models import load_model
from inertiakv.scripts import decode, plan, trace, train_scorer
from inertiakv.scripts import eval as evaluation
from inertiakv.scripts import report as reporting
from inertiakv.scripts.cli import arguments

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Programs that take too long to run here, and what tells whether their arguments make sense.
UNDERSTOOD: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "scripts/trace.py": (trace.Arguments, lambda args: trace.read_rules(args.rules)),
    "scripts/train_scorer.py": (train_scorer.Arguments, train_scorer.check),
    "scripts/eval.py": (
        evaluation.Arguments,
        lambda args: choose_rules(args.rule.policies.split(","), [], []),
    ),
    "scripts/report.py": (reporting.Arguments, lambda args: None),
    "scripts/plan.py": (plan.Arguments, lambda args: plan.make(args).as_json()),
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def table(marker: str) -> list[list[str]]:
    """The cells of a table's rows, those of its head left out."""
    rows = [line for line in marker.strip().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model instead of the default one, and nothing compiled."""
    folder = tiny_chat(tmp_path / "model", max_positions=32768)

    def load(name: str = "smollm2-135m", **options: Any) -> Any:
        assert name == "smollm2-135m"
        return load_model(folder, **options)

    class Eager(Decoder):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"compile": False}))

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        original = auto.from_pretrained
        monkeypatch.setattr(auto, "from_pretrained", lambda name, load=original: load(folder))
    for module in (models, decode):
        monkeypatch.setattr(module, "load_model", load)
    for module in (inertiakv, decode):
        monkeypatch.setattr(module, "Decoder", Eager)
    here = tmp_path / "checkout"
    here.mkdir()
    for name in ("scripts", "examples"):
        (here / name).symlink_to(ROOT / name)
    monkeypatch.chdir(here)


def test_the_table_of_policies() -> None:
    marked = re.search(r"<!-- policies -->(.*?)<!-- /policies -->", README, re.DOTALL)
    assert marked is not None
    rows = table(marked[1])
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row[0])] == list(POLICIES)
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[0]):
            config = POLICIES[name]
            fields = ("-", "nothing") if config is None else (f"`{config.scope}`", f"`{config.evict_at}`")
            assert (row[3], row[4]) == fields
            assert all(row)


def test_the_table_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    section = README.split("## From the command line")[1].split("\n## ")[0]
    named = set(re.findall(r"`(--[a-z-]+)", "".join(row[0] for row in table(section))))
    with pytest.raises(SystemExit):
        decode.main(["--help"])
    offered = set(
        re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"python scripts.*", "", capsys.readouterr().out))
    )
    assert named == offered - {"--help"}


@pytest.mark.usefixtures("tiny")
def test_python(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as a reader types them."""
    namespace: dict[str, Any] = {"Tensor": Tensor}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["decoder"].eviction == POLICIES["lazy4"]
    printed = capsys.readouterr().out
    assert "\nTrue\n" in printed
    assert printed.count("tokens are kept") == 2


def test_the_scorer_is_the_codes() -> None:
    (scorer,) = (block for block in blocks("python") if block.startswith("def "))
    assert scorer in (ROOT / "inertiakv" / "scorers.py").read_text(encoding="utf-8")


def recorded_commands(folder: Path) -> list[tuple[str, list[str], str]]:
    """Every program that the README's shell blocks call, with its arguments and what it read from a pipe. The
    shell is a real one, the programs write down what they are asked."""
    programs, log = folder / "bin", folder / "log"
    programs.mkdir()
    for name in ("python", "pip", "make", "torchrun"):
        shim = programs / name
        shim.write_text(
            f"#!{sys.executable}\n"
            "import json, stat, sys, os\n"
            "piped = stat.S_ISFIFO(os.fstat(0).st_mode)\n"
            f"entry = [{name!r}, sys.argv[1:], sys.stdin.read() if piped else '']\n"
            f"print(json.dumps(entry), file=open({str(log)!r}, 'a'))\n"
        )
        shim.chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks("bash"):
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], check=True, env=environment, stdin=subprocess.DEVNULL
        )
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


@pytest.mark.usefixtures("tiny")
def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    seen = set()
    for program, argv, piped in recorded_commands(tmp_path):
        seen.add(program)
        if program == "make":
            assert argv
            assert {word for word in argv if "=" not in word} <= set(targets)
        elif program == "pip":
            assert argv[0] == "install"
            assert set(re.findall(r"\w+", "".join(re.findall(r"\[(.*)\]", argv[-1])))) <= set(extras)
        elif program == "torchrun":
            assert argv[2] == "scripts/decode.py"
            arguments.parse(decode.Arguments, argv[3:], "")
        elif argv[0] == "scripts/decode.py":
            monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
            assert decode.main(argv[1:]) == 0, capsys.readouterr().err
            assert capsys.readouterr().out
        elif argv[0] in UNDERSTOOD:
            options, check = UNDERSTOOD[argv[0]]
            check(arguments.parse(options, argv[1:], ""))
        else:
            assert (ROOT / argv[0]).is_file()
    assert seen == {"make", "pip", "python", "torchrun"}


def test_links() -> None:
    """Every file and folder that it points to or speaks of is there."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_python_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in README


def test_the_demo_is_what_make_runs() -> None:
    """`make demo` pipes a text and a question that are there into a command line that is understood."""
    recipe = re.search(r"^demo:.*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    files, command = recipe[1].replace("\\\n", " ").split("|")
    assert all((ROOT / file).is_file() for file in files.split()[1:])
    argv = command.replace("$(DEMO_ARGS)", "").split()[2:]
    args = arguments.parse(decode.Arguments, argv, "")
    assert [name for name, _ in decode.choose_policies(args.policy)] == ["lazy4", "full"]


def test_the_sessions_of_the_largest_backbone_are_the_planned_ones() -> None:
    page = (ROOT / "benchmarks/llama-3.3-70b-plan.md").read_text(encoding="utf-8")
    fits = table(page.split("## What fits")[1].split("## How fast")[0])
    full, evicted = (row for row in fits if row[1:3] == ["2", "65,000"])
    assert f"holds {evicted[9]} sessions of 65,000 tokens instead of {full[9]}" in " ".join(README.split())
    assert f"and {evicted[8]} instead of {full[8]} if they are read together" in " ".join(README.split())


def test_the_time_of_generate_with_the_cache_is_the_measured_one() -> None:
    result = json.loads((ROOT / "benchmarks" / "smollm2-135m-cpu-generate.json").read_text(encoding="utf-8"))
    ratios = {c["dtype"]: c["ratio"] for c in result["contenders"] if c["name"] == "transformers-inertiakv"}
    said = f"take {ratios['bfloat16']:.2f} (bfloat16) and {ratios['float32']:.2f} (float32) of the time"
    assert said in " ".join(README.split())


def test_the_table_of_speeds_is_the_measured_one() -> None:
    results = json.loads((ROOT / "benchmarks/smollm2-135m-cpu.json").read_text())
    measured = {(c["name"], c["dtype"]): c for c in results["contenders"] if c["batch"] == 1}
    rows = table(README.split("<!-- speed -->")[1].split("<!-- /speed -->")[0])
    assert len(rows) == 6
    for policy, *rest in rows:
        name = policy.strip("`")
        low, full = measured[name, "bfloat16"], measured[name, "float32"]
        expected = [
            *(f"{c['tokens_per_second']:.1f}" for c in (low, full)),
            f"{low['cache_bytes'] / 1e6:.1f} MB",
        ]
        assert rest == expected
    prefill = [
        f"{measured['full', dtype]['first_token_ms'] / 1000:.0f} s in {dtype}"
        for dtype in ("bfloat16", "float32")
    ]
    assert all(seconds in README for seconds in prefill)
    compiled = results["compile_seconds"]
    assert f"{compiled['cold']:.0f} s to compile, and {compiled['warm']:.0f} s with" in README
