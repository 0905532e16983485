"""README and docs are true: figures are measured ones, Python runs, commands are understood."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import transformers
from torch import Tensor

import inertiakv
import inertiakv.models as models
from compile_tests.tiny import random_prompt, tiny_model
from compile_tests.tiny_chat import tiny_chat
from inertiakv import POLICIES, Decoder, EvictionConfig
from inertiakv.evals.rules import choose_rules
from inertiakv.models import chat as chats
from inertiakv.models import load_model
from inertiakv.scoring.scorers import SCORERS, Evidence
from inertiakv.scripts import chat, decode, plan, trace, train_scorer
from inertiakv.scripts import eval as evaluation
from inertiakv.scripts import report as reporting
from inertiakv.scripts.benchmarking.options import parse as parse_bench
from inertiakv.scripts.cli import arguments as parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(arguments: type, argv: list[str]) -> Any:
    return parser.parse(arguments, argv, "")


# Commands that take too long to run here, and what tells whether their arguments make sense.
UNDERSTOOD: dict[str, Callable[[list[str]], Any]] = {
    "chat": lambda argv: read(chat.Arguments, argv),
    "trace": lambda argv: trace.read_rules(read(trace.Arguments, argv)),
    "train-scorer": lambda argv: train_scorer.check(read(train_scorer.Arguments, argv)),
    "eval": lambda argv: choose_rules(read(evaluation.Arguments, argv).policies, [], []),
    "report": lambda argv: read(reporting.Arguments, argv),
    "plan": lambda argv: plan.make(read(plan.Arguments, argv)),
    "bench": lambda argv: parse_bench(argv, ""),
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


def table(page: str, marker: str) -> list[list[str]]:
    """The cells of the table between a pair of markers, those of its head left out."""
    marked = re.search(rf"<!-- {marker} -->(.*?)<!-- /{marker} -->", page, re.DOTALL)
    assert marked is not None
    return rows(marked[1])


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def words(page: str) -> str:
    """The page as one line, so that a sentence may be broken anywhere."""
    return " ".join(PAGES[page].split())


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model instead of the default one, the beginning of the demo's text, and nothing compiled."""
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
    for module in (inertiakv, decode, chats):
        monkeypatch.setattr(module, "Decoder", Eager)
    here = tmp_path / "checkout"
    demo = here / "scripts" / "demo"
    demo.mkdir(parents=True)
    for file in (ROOT / "scripts" / "demo").iterdir():
        (demo / file.name).write_text(file.read_text()[:2500])  # a token a byte
    (here / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(here)


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 10_000


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("page", [page for page in pages_with("python") if "contributing" not in page])
def test_python(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as a reader types them."""
    namespace: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), namespace)
    if "decoder" in namespace:
        assert namespace["decoder"].eviction == POLICIES["lazy4"]
    printed, code = capsys.readouterr().out, "".join(blocks(page, "python"))
    assert printed
    assert printed.splitlines().count("True") == code.count("# True")
    assert printed.count("tokens are kept") == code.count('"tokens are kept')


def test_the_scorer_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the oldest tokens, as it says."""
    namespace: dict[str, Any] = {"Tensor": Tensor, "Evidence": Evidence}
    (block,) = blocks("docs/contributing.md", "python")
    exec(block, namespace)
    monkeypatch.setitem(SCORERS, "recency", namespace["oldest"])
    decoder = Decoder(tiny_model(), EvictionConfig(budget=5, scorer="recency"), compile=False)
    decoder.generate(random_prompt(20), max_new_tokens=4)
    assert decoder.cache is not None
    assert set(decoder.cache.retention[0].position_BXN.flatten().tolist()) - {-1} == {0, 1, 2, 3, 4}


def recorded_commands(page: str, folder: Path) -> list[tuple[str, list[str], str]]:
    """Every program that the page's shell blocks call, with its arguments and what it read from a pipe. The
    shell is a real one, the programs write down what they are asked."""
    programs, log = folder / "bin", folder / "log"
    programs.mkdir()
    for name in ("python", "pip", "make", "torchrun", "inertiakv"):
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
    for block in blocks(page, "bash"):
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], check=True, env=environment, stdin=subprocess.DEVNULL
        )
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, argv, piped in recorded_commands(page, tmp_path):
        if program == "make":
            assert argv
            assert {word for word in argv if "=" not in word} <= set(targets)
        elif program == "pip":
            assert argv[0] == "install"
        elif program == "torchrun":
            assert argv[2] == "scripts/decode.py"
            read(decode.Arguments, argv[3:])
        elif program == "inertiakv" and argv[0] == "decode":
            monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
            assert decode.main(argv[1:]) == 0, capsys.readouterr().err
            assert capsys.readouterr().out
        else:
            assert program == "inertiakv"
            UNDERSTOOD[argv[0]](argv[1:])


def test_extras_and_version_of_python() -> None:
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or later" in PAGES["README.md"]
    named = re.findall(r"'\.\[(\w+)\]'", "".join(PAGES.values()))
    assert set(named) == set(PROJECT["optional-dependencies"]) - {"dev"}


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def test_links() -> None:
    """Every file, folder and section that a page points to is there, and so is every page that is listed."""
    pages = [ROOT / page for page in PAGES]
    results = sorted((ROOT / "benchmarks").rglob("README.md"))
    for page in [*pages, *results]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if link.startswith("https://"):
                continue
            target, _, anchor = link.partition("#")
            file = page.parent / target if target else page
            assert file.exists(), (page.name, link)
            assert not anchor or anchor in anchors(file), (page.name, link)
    listed = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", PAGES["README.md"]))
    assert listed == set(PAGES) - {"README.md"}


def test_files_that_are_named_exist() -> None:
    for page, text in PAGES.items():
        for name in re.findall(
            r"`((?:inertiakv|scripts|models|evals|compile_tests|benchmarks)/[\w./-]*)`", text
        ):
            assert (ROOT / name).exists(), (page, name)


def test_classes_that_are_named_exist() -> None:
    named = table(PAGES["docs/how-it-works.md"], "classes")
    for row in named:
        code = "".join(path.read_text() for path in (ROOT / row[1].strip("`")).glob("*.py"))
        for name in re.findall(r"\w+", row[0]):
            assert re.search(rf"^class {name}\b", code, re.MULTILINE), name


def test_the_demo_is_what_make_runs() -> None:
    """`make demo` pipes a text and a question that are there into a command line that is understood."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    recipe = re.search(r"^demo:.*?\n\t(.*)\n\t@echo .*\n", makefile, re.MULTILINE)
    assert recipe is not None
    files, command = recipe[1].split("|")
    assert all((ROOT / file).is_file() for file in files.split()[1:])
    args = read(decode.Arguments, command.replace("$(DEMO_ARGS)", "").split()[2:])
    assert [name for name, _ in decode.choose_policies(args)] == ["rehearsed", "full"]


# --- tables that are made of code


def test_the_table_of_policies() -> None:
    policies = table(PAGES["docs/rules.md"], "policies")
    assert [name for row in policies for name in re.findall(r"`(\w+)`", row[0])] == list(POLICIES)
    for row in policies:
        assert all(row)
        for name in re.findall(r"`(\w+)`", row[0]):
            config = POLICIES[name]
            fields = ("-", "nothing") if config is None else (f"`{config.scope}`", f"`{config.evict_at}`")
            assert (row[3], row[4]) == fields


def test_the_table_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGES["docs/command-line.md"].split("## Options")[1]
    named = set(re.findall(r"`(--[a-z-]+)", "".join(row[0] for row in rows(section))))
    with pytest.raises(SystemExit):
        decode.main(["--help"])
    offered = set(
        re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"python scripts.*", "", capsys.readouterr().out))
    )
    assert named == offered - {"--help"}


def test_the_commands_of_a_chat() -> None:
    section = PAGES["docs/command-line.md"].split("## Chat")[1].split("\n## ")[0]
    named = {name for row in rows(section) for name in re.findall(r"`(/[^`]+)`", row[0])}
    assert named == set(chat.COMMANDS)


def test_the_table_of_fields() -> None:
    """Those of a rule, each once."""
    section = PAGES["docs/rules.md"].split("## Changing a rule")[1].split("\n## ")[0]
    named = [name for row in rows(section) for name in re.findall(r"`(\w+)`", row[1])]
    assert sorted(named) == sorted(EvictionConfig.__dataclass_fields__)


# --- figures that were measured


def contenders(name: str) -> dict[tuple[str, str, int], dict[str, Any]]:
    result = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return {(c["name"], c["dtype"], c["batch"]): c for c in result["contenders"]}


def score(study: str, policy: str, length: int, *tasks: str, compression: float = 0.9) -> str:
    """Percent, the mean over tasks (by default all), at 90 % evicted where a share is evicted."""
    scores: dict[str, list[float]] = {}
    for path in (ROOT / "benchmarks" / study).glob("*/records.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            asked = (record["policy"], record["length"]) == (policy, length)
            if (
                asked
                and record["compression"] in (None, compression)
                and (not tasks or record["task"] in tasks)
            ):
                scores.setdefault(record["task"], []).append(100 * record["score"])
    return f"{mean(map(mean, scores.values())):.1f}"


def test_the_summary_is_the_measured_one() -> None:
    cpu, batches = contenders("smollm2-135m-cpu"), contenders("smollm2-135m-cpu-batches")

    def ms(name: str, dtype: str = "bfloat16", batch: int = 1) -> str:
        return f"{(batches if batch > 1 else cpu)[name, dtype, batch]['ms_per_step']['median']:.1f}"

    def megabytes(name: str) -> str:
        return f"{cpu[name, 'bfloat16', 1]['cache_bytes'] / 1e6:.1f} MB"

    def steps(dtype: str, evicting: str = "") -> list[str]:
        dynamic, static = ms("transformers", dtype), ms("transformers-static", dtype)
        rivals = f"transformers {dynamic}, compiled {static}{evicting}"
        return [rivals, ms("full", dtype), ms("inertiakv", dtype), ""]

    def scores(study: str, length: int, today: str = "") -> list[str]:
        return [today, *(score(study, name, length) for name in ("full", "inertiakv", "rehearsed"))]

    def today(length: int) -> str:
        tova, snapkv = (score("reproduction", name, length) for name in ("tova", "snapkv"))
        return f"TOVA {tova}, SnapKV {snapkv}"

    kvpress = contenders("smollm2-135m-cpu-kvpress")["kvpress", "bfloat16", 1]["ms_per_step"]["median"]
    link = f", [kvpress {kvpress:.1f}](benchmarks/README.md#smollm2-135m-cpu-kvpressjson)"
    expected = [
        *(scores("reproduction", length, today(length)) for length in (1024, 2048)),
        *(scores("rehearsal", length) for length in (2048, 4096)),
        steps("bfloat16", link),
        steps("float32"),
        ["", ms("full", batch=8), ms("inertiakv", batch=8), ""],
        [f"transformers {megabytes('transformers')}", megabytes("full"), megabytes("inertiakv"), ""],
    ]
    assert [row[1:] for row in table(PAGES["README.md"], "summary")] == expected


def test_which_policy_for_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """In five lines of the page, and of the help in short."""
    small = [score("reproduction", "rehearsed", 2048), score("reproduction", "full", 2048)]
    spans = [score("reproduction", "lazy4:pool=13", 2048), small[1]]
    half = [score("reproduction", "lazy4", 2048, compression=0.5), small[1]]
    plain, paper = (score("reproduction", name, 2048) for name in ("lazy4", "inertiakv"))
    less, tenth = (score("rehearsal", "rehearsed", 2048, compression=share) for share in (0.95, 0.9))
    full, lost = (score("rehearsal", name, 2048) for name in ("full", "inertiakv"))
    copies = [score("rehearsal", name, 512, "chains:copy") for name in ("rehearsed", "full", "inertiakv")]
    choice = table(PAGES["docs/rules.md"], "choice")
    assert [row[2:4] for row in choice] == [small, [less, full], spans, half, copies[:2]]
    others = [[paper], [tenth, lost], [plain], [], copies[2:]]
    assert [re.findall(r"\d+\.\d", row[4]) for row in choice] == others
    with pytest.raises(SystemExit):
        decode.main(["--help"])
    lines = capsys.readouterr().out.split("which policy, which budget")[1].splitlines()[1:6]
    short = [re.findall(r"\d+\.\d(?!\d)", line.split("  ")[-1]) for line in lines]
    assert short == [small, [less, full, tenth], spans, [*half, plain], copies]


def measured() -> Iterator[tuple[str, list[str]]]:
    """Figures that stand in the text of a page."""
    copies = (score("rehearsal", name, 512, "chains:copy") for name in ("full", "inertiakv", "rehearsed"))
    yield "README.md", [*copies]
    plan_page = (ROOT / "benchmarks/llama-3.3-70b-plan.md").read_text()
    fits = rows(plan_page.split("## What fits")[1].split("## How")[0])
    sessions = [row[8:10] for row in fits if row[1:3] == ["2", "65,000"]]
    results = re.search(
        r"held out, .*: (\d+) steps, .* ([\d.]+)% at most", (ROOT / "benchmarks/README.md").read_text()
    )
    assert len(sessions) == 2
    assert results is not None
    yield "docs/planning.md", [*chain(*sessions), results[1], f"{float(results[2]):.0f} %"]
    cpu = contenders("smollm2-135m-cpu-generate")
    ratios = (cpu["transformers-inertiakv", dtype, 1]["ratio"] for dtype in ("bfloat16", "float32"))
    yield "docs/transformers.md", [f"{ratio:.2f}" for ratio in ratios]


def test_figures_in_texts_are_measured_ones() -> None:
    for page, figures in measured():
        for figure in figures:
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d])", words(page)), (page, figure)


def test_the_table_of_speeds_is_the_measured_one() -> None:
    cpu, page = contenders("smollm2-135m-cpu"), words("docs/benchmarks.md")
    speeds = table(PAGES["docs/benchmarks.md"], "speed")
    assert len(speeds) == 6
    for policy, *rest in speeds:
        low, full = (cpu[policy.strip("`"), dtype, 1] for dtype in ("bfloat16", "float32"))
        per_second = (f"{c['tokens_per_second']:.1f}" for c in (low, full))
        assert rest == [*per_second, f"{low['cache_bytes'] / 1e6:.1f} MB"]
    for dtype in ("bfloat16", "float32"):
        assert f"{cpu['full', dtype, 1]['first_token_ms'] / 1000:.0f} s in {dtype}" in page
    compiled = json.loads((ROOT / "benchmarks/smollm2-135m-cpu.json").read_text())["compile_seconds"]
    assert f"{compiled['cold']:.0f} s to compile, and {compiled['warm']:.0f} s with" in page
