"""How much memory is free: what the machine has, and what its control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inertiakv.cache import memory

CPU = torch.device("cpu")


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.mark.parametrize(
    "inner, outer, free",
    [
        ({}, {}, None),
        ({"memory__max": "max", "memory__current": 9}, {}, None),
        ({"memory__max": 1000, "memory__current": 300}, {}, 700),
        ({"memory__max": 1000, "memory__current": 300, "memory__stat": "anon 1\ninactive_file 200"}, {}, 900),
        ({"memory__max": 1000, "memory__current": 1300}, {}, 0),
        ({"memory__max": 1000, "memory__current": 300}, {"memory__max": 500, "memory__current": 400}, 100),
        ({"memory__max": "max", "memory__current": 3}, {"memory__max": 500, "memory__current": 400}, 100),
    ],
)
def test_groups_of_version_2(
    tmp_path: Path, inner: dict[str, object], outer: dict[str, object], free: int | None
) -> None:
    write(tmp_path / "root" / "pod", **outer)
    write(tmp_path / "root" / "pod" / "own", **inner)
    (tmp_path / "own").write_text("0::/pod/own\n")
    assert memory._group_bytes(tmp_path / "root", tmp_path / "own") == free


def test_groups_of_version_1(tmp_path: Path) -> None:
    stat = "inactive_file 7\ntotal_inactive_file 50"
    files = {"memory__limit_in_bytes": 1000, "memory__usage_in_bytes": 300, "memory__stat": stat}
    write(tmp_path / "root" / "memory" / "own", **files)
    write(tmp_path / "root" / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=10**12)
    (tmp_path / "own").write_text("5:cpuset:/x\n4:memory,hugetlb:/own\n0::/\n")
    assert memory._group_bytes(tmp_path / "root", tmp_path / "own") == 750


def test_a_path_of_the_host_means_the_group_at_the_top(tmp_path: Path) -> None:
    write(tmp_path / "root", memory__max=1000, memory__current=300)
    (tmp_path / "own").write_text("0::/docker/of/the/host\n")
    assert memory._group_bytes(tmp_path / "root", tmp_path / "own") == 700


@pytest.mark.parametrize("machine, group, free", [(5, None, 5), (5, 3, 3), (2, 3, 2), (None, None, None)])
def test_the_least_counts(
    monkeypatch: pytest.MonkeyPatch, machine: int | None, group: int | None, free: int | None
) -> None:
    monkeypatch.setattr(memory, "_machine_bytes", lambda: machine)
    monkeypatch.setattr(memory, "_group_bytes", lambda: group)
    assert memory.available_bytes(CPU) == free
