"""Who may import whom: folders in one direction, torch's internals in one of them, no extras at the top."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    *("config", "model", "compiling", "cache", "attention", "eviction", "scoring", "requests", "decoding"),
    *("policies", "decoder", "integrations", "models", "evals", "scripts"),
)
"""What comes later may import what comes before."""
BARE = {"torch", "transformers", "safetensors", "einops", "numpy", "inertiakv", *sys.stdlib_module_names}
FILES = sorted(
    path for folder in ("inertiakv", "models", "evals", "scripts") for path in (ROOT / folder).rglob("*.py")
)


def module_of(path: Path) -> str:
    """The name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "inertiakv" else ("inertiakv", *parts)
    return ".".join(parts).removesuffix(".__init__")


def imports(path: Path, *, deferred: bool) -> Iterator[str]:
    """Modules that a file imports, in full; those within functions and for annotations alone where
    `deferred`."""
    package = module_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                yield from (f"{module}.{alias.name}" for alias in child.names)
            elif deferred or not (
                isinstance(child, ast.FunctionDef)
                or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
            ):
                yield from walk(child)

    return walk(ast.parse(path.read_text("utf-8")))


def folder_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "inertiakv" and len(parts) > 1 and parts[1] in FOLDERS else None


def test_imports_run_one_way() -> None:
    backwards = []
    for path in FILES:
        folder = folder_of(module_of(path))
        if folder is None:  # the package itself, which shows the public face
            continue
        later = FOLDERS[FOLDERS.index(folder) + 1 :]
        backwards += [(path, m) for m in imports(path, deferred=False) if folder_of(m) in later]
    assert backwards == []


def test_torchs_internals_stay_in_one_folder() -> None:
    for path in FILES:
        if folder_of(module_of(path)) == "compiling":
            continue
        modules = [module.split(".") for module in imports(path, deferred=True)]
        assert [m for m in modules if m[0] == "torch" and any(part[0] == "_" for part in m)] == [], path
        text = path.read_text("utf-8")
        assert not any(internal in text for internal in ("torch._dynamo", "torch._inductor")), path


def test_a_bare_machine_can_import_the_core_and_the_benchmark() -> None:
    for path in FILES:
        extras = folder_of(module_of(path)) in ("evals", "scripts", "integrations")
        if not extras or path == ROOT / "scripts" / "bench.py":
            assert {module.split(".")[0] for module in imports(path, deferred=False)} <= BARE, path
