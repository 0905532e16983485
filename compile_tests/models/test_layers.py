"""Linear layers with few rows: every way of computing them gives the library's product.

Shapes: R rows, I and O inputs and outputs.
"""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from compile_tests.models.reference import assert_close
from inertiakv.models.layers import Linear, linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("outputs", [20, 32])  # 32: one row is split into parts
def test_linear_equals_the_library(outputs: int, dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(48, outputs, bias)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    layer = layer.to(dtype)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="eager")
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6 if dtype == torch.float32 else 1e-14
    for shape in [(48,), (1, 48), (1, 1, 48), (2, 1, 48), (6, 48), (9, 48)]:
        x = torch.randn(shape, generator=generator).to(dtype)
        bias_O = None if layer.bias is None else layer.bias.double()
        expected = torch.nn.functional.linear(x.double(), layer.weight.double(), bias_O)
        for actual in (layer(x), compiled(x)):
            assert actual.shape == expected.shape
            assert actual.dtype == dtype
            assert_close(actual.double(), expected, tolerance)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("inputs", [96, 100])
def test_few_rows_of_bfloat16(inputs: int, compiled: bool) -> None:
    """Also with a number of inputs beyond the end of which the library's kernel would read."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randint(-128, 128, (24, inputs), dtype=torch.int8, generator=generator)
    scale_O1, bias_O = torch.rand(24, 1, generator=generator).bfloat16(), torch.ones(24).bfloat16()

    def products(inputs: list[Tensor]) -> list[Tensor]:
        return [linear(x_RI, weight_OI, bias_O, scale_O1) for x_RI in inputs]

    xs = [torch.randn(rows, inputs, generator=generator).bfloat16() for rows in (1, 2, 8)]
    actual = torch.compile(products, fullgraph=True, dynamic=False)(xs) if compiled else products(xs)
    for x_RI, y_RO in zip(xs, actual, strict=True):
        expected = x_RI.double() @ (weight_OI.double() * scale_O1.double()).T + bias_O
        assert_close(y_RO.double(), expected, 0.02)


@pytest.mark.parametrize(
    "changed",
    [
        lambda x_RI, scale_O1: (x_RI.flatten()[1:65].view(1, 64), scale_O1),
        lambda x_RI, scale_O1: (x_RI[:, 32:96], scale_O1),
        lambda x_RI, scale_O1: (x_RI[:, ::2], scale_O1),
        lambda x_RI, scale_O1: (x_RI[:, :64], scale_O1.expand(-1, 2).contiguous()[:, :1]),
        lambda x_RI, scale_O1: (x_RI[:0, :64], scale_O1),
    ],
    ids=["unaligned", "part", "strided", "strided_scale", "no_rows"],
)
def test_few_rows_lie_in_memory_in_any_way(changed: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x_RI, weight_OI = torch.randn(2, 128, generator=generator), torch.randint(-128, 128, (24, 64))
    x_RI, scale_O1 = changed(x_RI.bfloat16(), torch.rand(24, 1, generator=generator).bfloat16())
    actual = linear(x_RI, weight_OI.to(torch.int8), None, scale_O1)
    expected = x_RI.double() @ (weight_OI.double() * scale_O1.double()).T
    assert actual.shape == expected.shape
    if len(x_RI):
        assert_close(actual.double(), expected, 0.02)
