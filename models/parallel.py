"""Tensor parallelism: how processes form a group, and which part of the model each of them holds.

Attention is split by heads, the MLP and every expert by intermediate size, embedding and vocabulary head by
rows; norms and routers are whole in every process. What attention and MLP add to the hidden state is summed
over the group, two reductions a layer. The embedding is split like the head, so that tied ones stay one
matrix: each token's row comes from the process that holds it, one more reduction a forward pass.
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
"""How long to wait for a process that is alive: some take longer than others to read a checkpoint."""


def place() -> tuple[int, int, int]:
    """The global rank of this process, the number of processes, and the rank on this machine: as `torchrun`
    sets them in the environment, else (0, 1, 0). Raises ValueError for an invalid environment."""
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
def init_tensor_parallel(
    device: str | None = None, size: int | None = None
) -> Iterator[tuple[TensorParallel, torch.device]]:
    """Join the other processes of `torchrun`. Yields this process's tensor-parallel group and its device: a
    GPU of its own, or the CPU if there is none or `device` is "cpu".

    size: how many processes hold one model together, by default all. With fewer, each group of neighbours
        has a model of its own, and groups do not communicate.

    Raises ValueError for an invalid environment, device or size, and ConnectionError if another process of
    the group ends before this one does.
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
    from torch.distributed import nn  # noqa: F401  imported before there is a group, see below

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
    # Not after an error: it would wait for the others. Every reference to the group has to go first, since a
    # thread of it that outlives the interpreter aborts the process: `mesh`, and the default arguments of
    # functions in torch.distributed.nn, which keep the group that exists when it is first imported.
    del mesh
    dist.destroy_process_group()


def check_groups(size: int, count: int) -> None:
    """Raises ValueError if `count` processes do not divide into groups of `size`."""
    if size < 1 or count % size:
        raise ValueError(f"{count} processes do not go into groups of {size}, each with a model")


def share(config: ModelConfig, tp: TensorParallel) -> tuple[ModelConfig, TensorParallel]:
    """The sizes of one process's part of the model, and the group with its `kv_copies`: with fewer KV heads
    than processes several hold the same one. `vocab_size` stays that of the whole model.

    Raises ValueError for sizes that do not divide evenly.
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
    """Where this process's tensor of shape `own` lies in the whole one, which is split along the axis on
    which `own` is shorter. With fewer parts than processes, neighbours share one."""
    slices = []
    for size, length in zip(whole, own, strict=True):
        start = tp.rank * (size // length) // tp.size * length
        slices.append(slice(start, start + length))
    return tuple(slices)
