"""Compiled passes on disk: taken over where everything is as it was, and nowhere else."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import inertiakv.attention.dense
import inertiakv.decoding.forward
import inertiakv.models.layers
import inertiakv.scoring.scorers
from compile_tests.tiny import compiled_steps, random_prompts, step_fingerprint, tiny_model
from inertiakv import Decoder, EvictionConfig
from inertiakv.compiling.fingerprint import UnknownError
from inertiakv.models import Transformer

LAZY = EvictionConfig(compression=0.7, refresh=2)
PROMPTS = random_prompts((60,))


def small_model() -> Transformer:
    return tiny_model(3, layers=2, dtype=torch.float32)


def seen(model: nn.Module | None = None, rule: EvictionConfig | None = LAZY, slots: int = 60) -> str:
    """The fingerprint of a decode step."""
    decoder = Decoder(small_model() if model is None else model, rule, compile=False)
    decoder.prefill(random_prompts((slots,)))
    return step_fingerprint(decoder)


def answer(decoder: Decoder) -> list[int]:
    return decoder.generate(PROMPTS, 8, eos_token_ids=[]).tokens[0]


def eager() -> list[int]:
    return answer(Decoder(small_model(), LAZY, compile=False))


@pytest.fixture(scope="module")
def files() -> Iterator[list[Path]]:
    """The pass of a small model, alone in their cache at first."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import fresh_cache

    if not hasattr(torch.compile(abs), "aot_compile"):
        pytest.skip(f"torch {torch.__version__} keeps no compiled functions")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the tests, which loops are made for
    with fresh_cache():
        decoder = Decoder(small_model(), LAZY, compile=True)
        assert answer(decoder) == eager()
        assert (decoder.graphs.stats.compiled, decoder.graphs.stats.stored) == (1, 0)
        files = sorted((Path(cache_dir()) / "inertiakv").iterdir())
        assert len(files) == 1
        yield files
    torch.set_num_threads(threads)


def test_what_changes_no_graph_changes_no_fingerprint() -> None:
    plain = seen()
    other_weights = tiny_model(4, layers=2, dtype=torch.float32)
    other_weights.bytes_read, other_weights.source = 7, "elsewhere"
    assert seen(other_weights) == plain
    assert seen(copy.deepcopy(small_model())) == plain
    assert seen(rule=EvictionConfig(compression=0.5, alpha=0.3, refresh=4)) == plain


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return 2 * self.inner(*args)


def _another_norm(model: Transformer) -> None:
    model.layers[1].input_layernorm.eps = 1e-3


def _tied(model: Transformer) -> None:
    model.layers[1].mlp.up_proj.weight = model.layers[1].mlp.gate_proj.weight


def _transposed(model: Transformer) -> None:
    weight = model.layers[1].mlp.up_proj.weight
    model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.t().contiguous().t(), requires_grad=False)


def _trained(model: Transformer) -> None:
    model.layers[1].mlp.up_proj.weight.requires_grad_()


@pytest.mark.parametrize("change", [_another_norm, _tied, _transposed, _trained])
def test_another_model_has_another_fingerprint(change: Callable[[Transformer], None]) -> None:
    model = small_model()
    change(model)
    assert seen(model) != seen()


def test_another_form_or_shape_has_another_fingerprint() -> None:
    others = [
        seen(rule=None),
        seen(rule=EvictionConfig(compression=0.7, scope="layer")),
        seen(rule=EvictionConfig(compression=0.7, scorer="key_norm")),
        seen(slots=300),
        seen(small_model().to(torch.bfloat16)),
        seen(tiny_model(3, layers=3, dtype=torch.float32)),
    ]
    assert len({seen(), *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "where, name, value",
    [
        (inertiakv.attention.dense, "SPLITS", 4),
        (inertiakv.models.layers, "FEW_ROWS", 0),
        (inertiakv.models.layers, "one_row_product", inertiakv.models.layers.few_rows_product),
        (inertiakv.decoding.forward, "SCORERS", {**inertiakv.scoring.scorers.SCORERS, "attention": None}),
    ],
)
def test_what_is_replaced_at_run_time_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any
) -> None:
    before = seen()
    monkeypatch.setattr(where, name, value)
    assert seen() != before


def _of_others(model: Transformer) -> None:
    model.layers[1].mlp = Doubled(model.layers[1].mlp)


def _hooked(model: Transformer) -> None:
    model.layers[1].mlp.register_forward_hook(lambda module, args, out: 2 * out)


def _replaced(model: Transformer) -> None:
    model.layers[1].mlp.forward = lambda x: 2 * x


@pytest.mark.parametrize("change", [_of_others, _hooked, _replaced])
def test_a_model_with_code_of_others_has_no_fingerprint(change: Callable[[Transformer], None]) -> None:
    model = small_model()
    change(model)
    with pytest.raises(UnknownError, match=r"code of .*test_disk_cache"):
        seen(model)


@dataclasses.dataclass(frozen=True)
class Others(EvictionConfig):
    boost: float = 0.0


def test_a_rule_of_others_has_no_fingerprint() -> None:
    with pytest.raises(UnknownError, match=r"code of .*test_disk_cache"):
        seen(rule=Others(budget=20))


@pytest.mark.parametrize(
    "where, name",
    [
        (inertiakv.decoding.forward, "visible"),  # called by a method of a class that the step makes
        (inertiakv.attention.dense, "materialize"),  # three calls further
        (inertiakv.models.layers.MLP, "forward"),
        (torch.nn.functional, "silu"),
        (torch, "matmul"),
    ],
)
def test_functions_that_others_have_put_in_have_no_fingerprint(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    original = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **kwargs: original(*args, **kwargs))
    with pytest.raises(UnknownError, match=r"code of .*test_disk_cache"):
        seen()


def test_what_may_be_anything_has_no_fingerprint() -> None:
    model = small_model()
    model.layers[0].mlp.generator = torch.Generator()
    with pytest.raises(UnknownError, match="Generator"):
        seen(model)


def test_another_decoder_takes_the_passes_over(files: list[Path]) -> None:
    decoder = Decoder(small_model(), LAZY, compile=True)
    assert answer(decoder) == eager()
    stats = decoder.graphs.stats
    assert (stats.compiled, stats.stored, stats.recompiles) == (1, 1, 0)
    assert all(compiled.replays for compiled in compiled_steps(decoder).values())


_OTHER_PROCESS = """
import json, sys, torch
torch.set_num_threads(1)
from torch._dynamo.utils import counters
from compile_tests.compiling.test_disk_cache import LAZY, answer, small_model
from inertiakv import Decoder
decoder = Decoder(small_model(), LAZY, compile=True)
tokens = answer(decoder)
print(json.dumps([tokens, decoder.graphs.stats.stored, sum(counters["stats"].values())]))
"""


def test_another_process_traces_nothing(files: list[Path]) -> None:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [eager(), 1, 0]


def test_passes_of_other_code_are_not_taken_over(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = eager()
    monkeypatch.setattr(
        inertiakv.models.layers.MLP, "forward", lambda self, x: self.down_proj(self.up_proj(x))
    )
    decoder = Decoder(small_model(), LAZY, compile=True)
    assert answer(decoder) == eager() != before
    assert decoder.graphs.stats.stored == 0


@pytest.mark.parametrize("damage", ["cut", "one bit"])
def test_a_damaged_file_is_written_anew(files: list[Path], damage: str) -> None:
    sizes = [file.stat().st_size for file in files]
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data if damage == "one bit" else data[:1000])
    decoder = Decoder(small_model(), LAZY, compile=True)
    assert answer(decoder) == eager()
    assert decoder.graphs.stats.stored == 0
    assert all(file.stat().st_size > size / 2 for file, size in zip(files, sizes, strict=True))


def test_what_cannot_be_written_runs_all_the_same(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.aot_compile import AOTCompiledFunction

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("cannot be written")

    monkeypatch.setattr(AOTCompiledFunction, "save_compiled_function", fail)
    before = sorted(files[0].parent.iterdir())
    rule = EvictionConfig(compression=0.7, scorer="key_norm")
    decoder = Decoder(small_model(), rule, compile=True)
    assert answer(decoder) == answer(Decoder(small_model(), rule, compile=False))
    assert sorted(files[0].parent.iterdir()) == before


def test_without_the_compilers_cache_nothing_is_kept(files: list[Path]) -> None:
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        decoder = Decoder(small_model(), LAZY, compile=True)
        assert answer(decoder) == eager()
    assert decoder.graphs.stats.stored == 0
