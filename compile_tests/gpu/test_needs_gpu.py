"""What is promised to fit on a GPU: at least what is taken, and at most 15 percent more."""

from __future__ import annotations

import pytest
import torch

from compile_tests.decoding.peaks import ANSWER, CHUNK, model, prompts
from inertiakv import POLICIES, Decoder, policy
from inertiakv.cache import memory

MOST = 1.15


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", list(POLICIES))
def test_promises_of_every_policy(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    promised: list[int] = []
    original = memory.require

    def spy(parts: dict[str, int], *args: object) -> None:
        promised.append(sum(parts.values()))
        original(parts, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "require", spy)
    on_gpu, options = model(torch.bfloat16, "cuda"), {"attention": "dense", "compile": False}
    # The first request fills what libraries keep.
    for _ in range(2):
        decoder = Decoder(on_gpu, policy(name), prefill_chunk=CHUNK, **options)  # type: ignore[arg-type]
        promised.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        decoder.generate(prompts(rows), ANSWER, eos_token_ids=())
        taken = torch.cuda.max_memory_allocated() - before
        del decoder
    assert taken <= promised[0] <= MOST * taken
