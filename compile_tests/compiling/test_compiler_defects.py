"""Defects of the compiler that the core works around. A test that fails says that a workaround can go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention


class Layer:
    """As `LayerPass`: hands a result out beside what it returns."""

    def __init__(self) -> None:
        self.attribute: Tensor | None = None
        self.items: list[Tensor] = []

    def attend(self, q_BHTD: Tensor) -> Tensor:
        out_BHTD = flex_attention(q_BHTD, q_BHTD, q_BHTD)
        assert isinstance(out_BHTD, Tensor)
        self.attribute = out_BHTD.sum()
        self.items.append(out_BHTD.sum())
        return out_BHTD


def test_an_attribute_set_after_flex_attention_is_lost_in_a_region() -> None:
    """Why `LayerPass.scored` is a list."""

    @torch.compiler.nested_compile_region
    def region(q_BHTD: Tensor) -> tuple[Any, ...]:
        layer = Layer()
        layer.attend(q_BHTD)
        return layer.attribute, *layer.items

    step = torch.compile(lambda q_BHTD: region(q_BHTD), fullgraph=True)
    attribute, item = step(torch.randn(1, 2, 128, 16))
    assert attribute is None
    assert item is not None


@pytest.mark.usefixtures("nothing_compiled_yet")
@pytest.mark.parametrize("size, graphs", [((), 2), ((1,), 1)])
def test_a_buffer_without_axes_compiles_twice(size: tuple[int, ...], graphs: int) -> None:
    """Why buffers of `DecodingRule` have one axis. It shows on a cold cache alone."""
    compiled = 0

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs)

    @torch.compiler.nested_compile_region
    def region(x_N: Tensor, factor: Tensor) -> Tensor:
        return x_N * factor

    module = nn.Module()
    module.register_buffer("factor", torch.full(size, 0.5, dtype=torch.float64))
    step = torch.compile(
        lambda module, x_N: region(x_N, module.factor), fullgraph=True, dynamic=False, backend=backend
    )
    for value in (0.5, 0.25, 0.75):
        module.factor.fill_(value)
        assert step(module, torch.ones(4, dtype=torch.float64)).tolist() == [value] * 4
    assert compiled == graphs
