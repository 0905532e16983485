"""Saved conversations: written whole or not at all, and known to belong to one model alone."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compile_tests.tiny import decoder_for, random_prompt, tiny_model
from inertiakv import Decoder, EvictionConfig
from inertiakv.decoding import saving
from inertiakv.models import Transformer

MODEL = tiny_model(11)
RULE = EvictionConfig(compression=0.7)


def started(model: Transformer = MODEL, seed: int = 0) -> Decoder:
    decoder = decoder_for(model, RULE)
    decoder.generate(random_prompt(40, seed), 3)
    return decoder


def content(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", [name for name, _ in MODEL.named_parameters()])
def test_a_model_with_other_weights_anywhere_is_another(tmp_path: Path, name: str) -> None:
    started().save(tmp_path / "saved")
    other = copy.deepcopy(MODEL)
    parameter = other.get_parameter(name)
    parameter.data.mul_(1 + 1e-9)  # as a merged adapter changes a whole matrix, however little
    with pytest.raises(ValueError, match="same sizes and other weights"):
        decoder_for(other, RULE).load(tmp_path / "saved")
    parameter.data.copy_(MODEL.get_parameter(name))
    decoder_for(other, RULE).load(tmp_path / "saved")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_checksum_copies_little_of_a_large_parameter(dtype: torch.dtype) -> None:
    large = torch.zeros(3_000, 400).to(dtype)
    found = saving._spread(large)
    assert (found.shape, found.dtype) == ((saving.SAMPLES,), dtype)
    large[-1, -1] = 3
    assert saving._spread(large)[-1] == 3
    assert torch.equal(saving._spread(large.T.contiguous().T), saving._spread(large))
    assert saving._spread(torch.tensor(2.0)).tolist() == [2.0]


def test_a_file_of_another_version_is_refused_by_its_version(tmp_path: Path) -> None:
    decoder, path = started(), tmp_path / "saved"
    decoder.save(path)
    metadata, tensors = content(path)
    save_file(tensors, path, metadata | {"format": "inertiakv conversation 2"})
    with pytest.raises(ValueError, match="a conversation of version 2, and this is version 3: load it with"):
        decoder.load(path)
    save_file(tensors, path, metadata | {"format": "pt"})
    with pytest.raises(ValueError, match="no saved conversation"):
        decoder.load(path)


def test_the_names_in_a_file_stay(tmp_path: Path) -> None:
    started().save(tmp_path / "saved")
    names = set(content(tmp_path / "saved")[1])
    assert {"cache.layers.0.k_BGND", "cache.tables.0.utility_BXN", "rows.token_B"} <= names


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_cut_file_is_refused(tmp_path: Path, share: float) -> None:
    decoder, path = started(), tmp_path / "saved"
    decoder.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="no readable safetensors file"):
        decoder.load(path)


def full_disk(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
    Path(path).write_bytes(b"the first part")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("when", ["writing", "synchronising", "replacing"])
def test_a_full_disk_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path, decoder = tmp_path / "saved", started()
    decoder.save(path)
    before, other = path.read_bytes(), started(seed=5)

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        if when == "writing":
            full.setattr(saving, "save_file", full_disk)
        else:
            full.setattr(saving.os, "fsync" if when == "synchronising" else "replace", fails)
        with pytest.raises(OSError, match=r"the conversation was not saved: .*No space left") as caught:
            other.save(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    decoder.load(path)
    other.save(path)
    assert path.read_bytes() != before


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the conversation was not saved"):
        started().save(tmp_path / "nowhere" / "saved")


def test_a_process_killed_midway_leaves_the_former_file(tmp_path: Path) -> None:
    decoder, path = started(), tmp_path / "saved"
    decoder.save(path)
    before = path.read_bytes()
    killed = """
        import os, signal, sys
        from pathlib import Path
        from compile_tests.decoding.test_saving import saving, started

        def killed(tensors, path, metadata):
            Path(path).write_bytes(b"the first part")
            os.kill(os.getpid(), signal.SIGKILL)

        decoder = started(seed=5)
        saving.save_file = killed
        decoder.save(sys.argv[1])
    """
    code = [sys.executable, "-c", textwrap.dedent(killed), str(path)]
    assert subprocess.run(code, timeout=300, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    decoder.load(path)


def test_a_file_is_as_readable_as_others(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    started().save(tmp_path / "saved")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
