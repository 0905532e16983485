"""What a process holds of the system's memory once a prompt has been evicted."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
    import sys
    import torch
    from compile_tests.tiny import random_prompt, tiny_model
    from inertiakv import Decoder, EvictionConfig
    from inertiakv.cache import memory

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    if sys.argv[1] == "kept":
        memory.give_back = lambda device, size: None
    model = tiny_model(dtype=torch.float32, layers=40, kv_heads=4, head_dim=16, max_positions=5000)
    decoder = Decoder(model, EvictionConfig(compression=0.9), compile=False, prefill_chunk=512)
    decoder.generate(random_prompt(300), 2)
    before = resident()
    out = decoder.generate(random_prompt(4000), 2)
    print(resident() - before - out.stats.cache_bytes, out.stats.full_cache_bytes)
"""


def left(how: str) -> tuple[int, int]:
    # Blocks of a cache's layers as those of a large model in use: below glibc's threshold for a map each.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CODE), how]
    out = subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout
    rest, cache = map(int, out.split())
    return rest, cache


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="for glibc")
@pytest.mark.slow
def test_an_evicted_prompt_goes_back_to_the_system() -> None:
    rest, cache = left("given back")
    kept, _ = left("kept")
    assert kept > 0.5 * cache
    assert rest < 0.2 * cache
