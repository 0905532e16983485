"""One model on several devices: who joins, and what each of them holds.

Attention is split by heads, the MLP and every expert by intermediate size, embedding and vocabulary head by
rows; norms and routers are whole on each rank. So a rank computes a part of what attention and MLP add to the
hidden state, and their sum, two reductions a layer, is the same on all. The embedding is split like the head,
so that tied ones stay one table: each token's row comes from the rank that has it, one reduction more a pass.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel

from .config import ModelConfig

PATIENCE = timedelta(minutes=10)
"""For a rank that lives but does not answer: reading a checkpoint may take one of them longer than others."""


def place() -> tuple[int, int, int]:
    """Which of the processes of `torchrun` this is, of how many, and which of those on its machine. By its
    environment; started in another way: alone. Raises ValueError for one that cannot be."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    try:
        index, count, local = (
            int(os.environ.get(name, default)) for name, default in zip(names, "010", strict=True)
        )
    except ValueError as error:
        raise ValueError(f"{', '.join(names)} must be whole numbers: {error}") from error
    if not 0 <= index < count:
        raise ValueError(f"RANK must be from 0 to WORLD_SIZE - 1, got {index} of {count}")
    return index, count, local


@contextmanager
def joined(
    device: str | None = None, size: int | None = None
) -> Iterator[tuple[TensorParallel, torch.device]]:
    """Join the other processes of `torchrun`: this one's rank, and its device, which is a GPU of its own, or
    the CPU where there is none or `device` says so. `size`: how many hold a model together, by default all;
    with fewer, neighbours do, and groups of them, or with 1 all processes, do not talk to each other.

    Raises ValueError for an environment, a device or a size that cannot be, and ConnectionError where another
    one of the group ends before this one does.
    """
    index, count, local = place()
    size = count if size is None else size
    check_groups(size, count)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if count == 1:
        yield SINGLE_PROCESS, torch.device(kind)
        return
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {kind!r} with {count} ranks: give cpu, or cuda for a GPU each")
    if kind == "cuda" and local >= torch.cuda.device_count():
        raise ValueError(f"rank {index} needs a GPU of its own; there are {torch.cuda.device_count()}")
    own = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if size == 1:
        yield SINGLE_PROCESS, own
        return

    import torch.distributed as dist
    from torch.distributed import nn  # noqa: F401  which would hold the group if imported later, see below

    if kind == "cuda":
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", timeout=PATIENCE, device_id=own)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    axes = {"heads": size} if size == count else {"models": count // size, "heads": size}
    mesh = dist.init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    try:
        yield TensorParallel(index % size, size, mesh.get_group("heads").group_name), own
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ConnectionError(f"rank {index} has lost another one of {count}: {error}") from error
        raise
    # Not after an error, when it would wait for the others. It has to end the group's threads here: one that
    # lives on until the interpreter is gone aborts the process. Default arguments of torch.distributed.nn are
    # whatever group there is when it is first imported, for good.
    del mesh
    dist.destroy_process_group()


def check_groups(size: int, count: int) -> None:
    """Raise ValueError where processes do not go into groups of a size."""
    if size < 1 or count % size:
        raise ValueError(f"{count} processes do not go into groups of {size}, each with a model")


def share(config: ModelConfig, tp: TensorParallel) -> tuple[ModelConfig, TensorParallel]:
    """The sizes of what a rank holds, beside the vocabulary, which all of them choose from. Where there are
    fewer KV heads than ranks each is held by several, which the ranks that are returned say.

    Raises ValueError for sizes that do not go into the ranks evenly.
    """
    count, moe = tp.size, config.moe
    if count == 1:
        return config, tp
    sizes = {"{} attention heads are": config.num_heads, "a vocabulary of {} is": config.vocab_size}
    if moe is None or not all(moe.sparse):
        sizes["an intermediate size of {} is"] = config.intermediate_size
    if moe is not None:
        sizes["experts of size {} are"] = moe.intermediate_size
    for name, size in sizes.items():
        if size % count:
            raise ValueError(f"{count} ranks: {name.format(size)} no multiple of that")
    heads = config.num_kv_heads
    if heads % count and count % heads:
        raise ValueError(f"{count} ranks: {heads} KV heads are neither a multiple nor a divisor of that")
    local = dataclasses.replace(
        config,
        num_heads=config.num_heads // count,
        num_kv_heads=max(1, heads // count),
        intermediate_size=max(1, config.intermediate_size // count),
        moe=moe and dataclasses.replace(moe, intermediate_size=moe.intermediate_size // count),
    )
    return local, tp._replace(kv_copies=max(1, count // heads))


def part(whole: tuple[int, ...], own: tuple[int, ...], tp: TensorParallel) -> tuple[slice, ...]:
    """Where a rank's tensor of shape `own` lies in that of the whole model: it is split along the axis on
    which it is shorter, into as many parts as go into the whole, and neighbours share a part where these are
    fewer than the ranks."""
    slices = []
    for size, length in zip(whole, own, strict=True):
        start = tp.rank * (size // length) // tp.size * length
        slices.append(slice(start, start + length))
    return tuple(slices)
