"""Compiled attention of one query on the GPU against float64, with fresh inputs and poisoned slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from inertiakv.attention.dense import dense_step, dense_weights
from inertiakv.attention.flex import flex, flex_mask, flex_step
from inertiakv.attention.mask import block_lists, visible

CASES = [  # query heads, KV heads, head dim, slots, dtype, window
    (32, 8, 128, 6656, torch.bfloat16, None),  # Llama-3.1-8B, a tenth of 64k
    (28, 4, 128, 1024, torch.bfloat16, 300),  # Qwen2.5-7B
    (9, 3, 64, 640, torch.float32, None),  # SmolLM2
    (6, 6, 16, 128, torch.float32, 60),
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def inputs(
    heads: int, kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows that are full but for a slot, that leave whole blocks empty, that have ended, and that hold what
    is yet to come. Empty slots hold NaN as K and 1e30 as V."""
    generator = torch.Generator("cuda").manual_seed(seed)
    k_BGND, v_BGND = (
        torch.randn(4, kv_heads, slots, head_dim, generator=generator, device="cuda") for _ in range(2)
    )
    q_BHD = torch.randn(4, heads, head_dim, generator=generator, device="cuda")
    position_BXN = torch.full((4, 1, slots), -1, dtype=torch.int32, device="cuda")
    for row, held in enumerate((slots - 1, slots // 3, slots, slots)):
        within = slots if row != 1 else slots // 2
        used = torch.randperm(within, generator=generator, device="cuda")[:held]
        position_BXN[row, 0, used] = 3 * torch.arange(len(used), dtype=torch.int32, device="cuda")
    query_B1 = torch.tensor([[3 * slots], [3 * slots], [-1], [slots]], device="cuda")
    unused_B1N1 = (position_BXN < 0)[..., None]
    k_BGND, v_BGND = k_BGND.masked_fill(unused_B1N1, torch.nan), v_BGND.masked_fill(unused_B1N1, 1e30)
    return q_BHD.to(dtype), k_BGND.to(dtype), v_BGND.to(dtype), position_BXN, query_B1


@pytest.mark.parametrize("heads, kv_heads, head_dim, slots, dtype, window", CASES)
def test_both_forms_against_float64(
    heads: int, kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype, window: int | None, seed: int
) -> None:
    scale = head_dim**-0.5
    q_BHD, k_BGND, v_BGND, position_BXN, query_B1 = inputs(heads, kv_heads, head_dim, slots, dtype, seed)
    seen_BXN = visible(position_BXN, query_B1, window)[:, :, 0]
    weights_BGRN = dense_weights(q_BHD.double(), k_BGND.double(), seen_BXN, scale)
    out_BHD = torch.matmul(weights_BGRN, v_BGND.double()).flatten(1, 2)
    assert (weights_BGRN[2] == 0).all(), "the row that has ended sees nothing"

    def mask_of(position_BXN: Tensor, query_B1: Tensor) -> BlockMask:
        blocks = block_lists(position_BXN, query_B1, window)
        return flex_mask(blocks, position_BXN, query_B1, window, heads // kv_heads)

    def plain(half_BH1D: Tensor, position_BXN: Tensor, query_B1: Tensor) -> tuple[Tensor, None]:
        mask = mask_of(position_BXN, query_B1)
        return flex(2 * half_BH1D, k_BGND, v_BGND, mask, scale)[:, :, 0], None

    def scoring(half_BH1D: Tensor, position_BXN: Tensor, query_B1: Tensor) -> tuple[Tensor, Tensor]:
        mask, seen_BXN = mask_of(position_BXN, query_B1), visible(position_BXN, query_B1, window)[:, :, 0]
        return flex_step((2 * half_BH1D)[:, :, 0], k_BGND, v_BGND, mask, seen_BXN, scale)

    def dense(half_BH1D: Tensor, position_BXN: Tensor, query_B1: Tensor) -> tuple[Tensor, Tensor]:
        seen_BXN = visible(position_BXN, query_B1, window)[:, :, 0]
        return dense_step((2 * half_BH1D)[:, :, 0], k_BGND, v_BGND, seen_BXN, scale)

    torch._dynamo.reset()
    largest = float(out_BHD.abs().max())
    for function in (plain, scoring, dense):  # of a query that is computed, as it always is
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        found_BHD, found_BGRN = compiled(q_BHD[:, :, None] / 2, position_BXN, query_B1)
        assert found_BHD.dtype == dtype
        torch.testing.assert_close(found_BHD.double(), out_BHD, rtol=0, atol=TOLERANCE[dtype] * largest)
        if found_BGRN is not None:  # from the inputs as they are, so exact to float32 in any dtype
            torch.testing.assert_close(found_BGRN.double(), weights_BGRN, rtol=1e-3, atol=1e-6)
