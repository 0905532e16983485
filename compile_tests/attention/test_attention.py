"""The attention forms against a plain softmax over the visible slots, in any order of slots."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from inertiakv.attention.backend import choose_backend
from inertiakv.attention.dense import dense_chunk, dense_step, observed
from inertiakv.attention.flex import flex, flex_mask, flex_step
from inertiakv.attention.mask import block_lists, visible

GROUPINGS = [(2, 2), (6, 2), (4, 1), (12, 2), (7, 1), (16, 2)]  # 1, 3, 4, 6, 7 and 8 query heads a KV head
D = 16
SCALE = 0.3


def reference(
    q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, position_BXN: Tensor, query_BT: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and weights [B, H, T, N] by loops over single queries, in float64. Positions of one
    set for all heads, or one for each KV head."""
    rows, heads, queries, _ = q_BHTD.shape
    out = torch.zeros(q_BHTD.shape, dtype=torch.float64)
    weights = torch.zeros(rows, heads, queries, k_BGND.shape[2], dtype=torch.float64)
    for b in range(rows):
        for t in range(queries):
            p = int(query_BT[b, t])
            for h in range(heads):
                g = h // (heads // k_BGND.shape[1])
                held = position_BXN[b, g if position_BXN.shape[1] > 1 else 0].tolist()
                seen = [n for n, j in enumerate(held) if 0 <= j <= p and (window is None or p - j < window)]
                if not seen:
                    continue
                logits = k_BGND[b, g, seen].double() @ q_BHTD[b, h, t].double() * SCALE
                weights[b, h, t, seen] = logits.softmax(0)
                out[b, h, t] = logits.softmax(0) @ v_BGND[b, g, seen].double()
    return out, weights


def whole_mask(position_BXN: Tensor, query_BT: Tensor, window: int | None, group: int = 3) -> BlockMask:
    return flex_mask(block_lists(position_BXN, query_BT, window), position_BXN, query_BT, window, group)


def shuffled_cache(
    kv_heads: int, slots: int, filled: list[int], seed: int, sets: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and positions of rows that hold positions 0, 3, 6... in slots in no order, those of further sets
    fewer of them and larger ones; the other slots hold NaN keys and huge values."""
    generator = torch.Generator().manual_seed(seed)
    k_BGND, v_BGND = torch.randn(2, len(filled), kv_heads, slots, D, generator=generator).unbind()
    position_BXN = torch.full((len(filled), sets, slots), -1, dtype=torch.int32)
    for row, most in enumerate(filled):
        for x in range(sets):
            count = most // (x + 1)
            used = torch.randperm(slots, generator=generator)[:count]
            position_BXN[row, x, used] = x + 3 * torch.arange(count, dtype=torch.int32)
    unused = (position_BXN < 0)[..., None]
    return k_BGND.masked_fill(unused, torch.nan), v_BGND.masked_fill(unused, 1e30), position_BXN


@pytest.mark.parametrize("heads, kv_heads", GROUPINGS)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("by_head", [False, True], ids=["a set", "a set a head"])
def test_one_query(heads: int, kv_heads: int, window: int | None, by_head: bool) -> None:
    sets = kv_heads if by_head else 1
    k_BGND, v_BGND, position_BXN = shuffled_cache(kv_heads, 128, [1, 100, 60], seed=heads, sets=sets)
    q_BHD = torch.randn(3, heads, D, generator=torch.Generator().manual_seed(1))
    query_B1 = torch.tensor([[0], [310], [90]])
    expected, weights = reference(q_BHD[:, :, None], k_BGND, v_BGND, position_BXN, query_B1, window)
    out_BHD, weights_BGRN = dense_step(
        q_BHD, k_BGND, v_BGND, visible(position_BXN, query_B1, window)[:, :, 0], SCALE
    )
    torch.testing.assert_close(out_BHD.double(), expected[:, :, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights_BGRN.flatten(1, 2).double(), weights[:, :, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("slots", [1, 127, 128, 129, 255, 257])
@pytest.mark.parametrize("sets", [1, 2])
def test_flex_with_any_number_of_slots(slots: int, sets: int) -> None:
    filled = [slots, max(1, slots // 2)]
    k_BGND, v_BGND, position_BXN = shuffled_cache(2, slots, filled, seed=slots, sets=sets)
    q_BHD = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(1))
    query_B1 = torch.tensor([[3 * slots], [slots]])
    expected, weights = reference(q_BHD[:, :, None], k_BGND, v_BGND, position_BXN, query_B1, None)
    seen_BXN = visible(position_BXN, query_B1, None)[:, :, 0]
    out_BHD, weights_BGRN = flex_step(
        q_BHD, k_BGND, v_BGND, whole_mask(position_BXN, query_B1, None), seen_BXN, SCALE
    )
    torch.testing.assert_close(out_BHD.double(), expected[:, :, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights_BGRN.flatten(1, 2).double(), weights[:, :, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", ["dense", "flex"])
@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("sets", [1, 2])
def test_a_chunk_of_ragged_prompts(form: str, window: int | None, sets: int) -> None:
    """Two rows, whose chunk of 300 follows 60 and 20 tokens; the second has only 130 of it, then padding. A
    second set holds the first row's last 9 older tokens alone."""
    generator = torch.Generator().manual_seed(3)
    slots, queries, starts, lengths = 384, 300, (60, 20), (300, 130)
    k_BGND, v_BGND = torch.randn(2, 2, 2, slots, D, generator=generator).unbind()
    q_BHTD = torch.randn(2, 6, queries, D, generator=generator)
    position_BXN = torch.full((2, sets, slots), -1, dtype=torch.int32)
    query_BT = torch.full((2, queries), -1)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        position_BXN[row, :, : start + length] = torch.arange(start + length, dtype=torch.int32)
        query_BT[row, :length] = torch.arange(start, start + length)
    position_BXN[0, 1:, : starts[0] - 9] = -1
    # Queries at the ends of blocks and of the row, and some between.
    picked = [*range(0, 300, 23), 67, 68, 107, 108, 127, 128, 129, 130, 195, 196, 235, 255, 256, 299]
    picked_BT = query_BT[:, picked]
    expected, _ = reference(q_BHTD[:, :, picked], k_BGND, v_BGND, position_BXN, picked_BT, window)
    if form == "dense":
        end = max(starts) + queries
        seen = (q_BHTD, k_BGND[:, :, :end], v_BGND[:, :, :end], position_BXN[..., :end])
        out_BHTD = dense_chunk(*seen, query_BT, window, SCALE, end)
    else:
        out_BHTD = flex(q_BHTD, k_BGND, v_BGND, whole_mask(position_BXN, query_BT, window), SCALE)
    assert not out_BHTD.isnan().any()
    torch.testing.assert_close(out_BHTD[:, :, picked].double(), expected, atol=1e-5, rtol=1e-5)
    padding = (query_BT < 0)[:, None, :, None].expand_as(out_BHTD)
    assert (out_BHTD[padding] == 0).all()


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (2, 2)])
@pytest.mark.parametrize("old, queries", [(0, 300), (1, 2), (127, 129), (200, 257), (600, 5)])
def test_a_chunk_at_the_same_slots_in_every_row(heads: int, kv_heads: int, old: int, queries: int) -> None:
    """Older tokens in no order and with gaps, then the chunk's own, of which the second row has only one;
    behind them, and in padding, huge values."""
    generator = torch.Generator().manual_seed(old)
    slots, end = 960, old + queries
    k_BGND, v_BGND = torch.randn(2, 2, kv_heads, slots, D, generator=generator).unbind()
    q_BHTD = torch.randn(2, heads, queries, D, generator=generator)
    position_BXN = torch.full((2, 1, slots), -1, dtype=torch.int32)
    query_BT = torch.full((2, queries), -1)
    for row, length in enumerate((queries, 1)):
        position_BXN[row, 0, :old] = 3 * torch.randperm(old, generator=generator, dtype=torch.int32)
        query_BT[row, :length] = 3 * old + torch.arange(length)
        position_BXN[row, 0, old : old + length] = query_BT[row, :length]
        v_BGND[row, :, old + length :] = 1e30
    expected, _ = reference(q_BHTD, k_BGND, v_BGND, position_BXN, query_BT, None)
    seen = (position_BXN[..., :end], query_BT, None)
    out_BHTD = dense_chunk(
        q_BHTD, k_BGND[:, :, :end], v_BGND[:, :, :end], *seen, SCALE, end, slots_before=old
    )
    real = (query_BT >= 0)[:, None, :, None].expand_as(out_BHTD)
    torch.testing.assert_close(out_BHTD[real].double(), expected[real], atol=1e-5, rtol=1e-5)
    assert (out_BHTD[~real] == 0).all()


def test_a_window_hides_older_tokens_at_the_same_slots_too() -> None:
    generator = torch.Generator().manual_seed(0)
    k_BGND, v_BGND = torch.randn(2, 1, 2, 90, D, generator=generator).unbind()
    q_BHTD = torch.randn(1, 6, 50, D, generator=generator)
    position_BXN, query_BT = torch.arange(90, dtype=torch.int32)[None, None], torch.arange(40, 90)[None]
    expected, _ = reference(q_BHTD, k_BGND, v_BGND, position_BXN, query_BT, 30)
    out_BHTD = dense_chunk(q_BHTD, k_BGND, v_BGND, position_BXN, query_BT, 30, SCALE, 90, slots_before=40)
    torch.testing.assert_close(out_BHTD.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sets", [1, 2])
def test_several_queries_that_score_together(sets: int) -> None:
    k_BGND, v_BGND, position_BXN = shuffled_cache(2, 128, [128, 40], seed=5, sets=sets)
    q_BHTD = torch.randn(2, 6, 4, D, generator=torch.Generator().manual_seed(1))
    query_BT = torch.tensor([[-1, 30, 100, 381], [-1, -1, 9, 60]])
    expected, weights = reference(q_BHTD, k_BGND, v_BGND, position_BXN, query_BT, 200)
    seen_BXTN = visible(position_BXN, query_BT, 200)
    out_BHTD, weights_BGRN = observed(q_BHTD, k_BGND, v_BGND, seen_BXTN, SCALE)
    torch.testing.assert_close(out_BHTD.double(), expected, atol=1e-5, rtol=1e-5)
    found = weights_BGRN.unflatten(2, (3, 4)).flatten(1, 2)
    torch.testing.assert_close(found.double(), weights, atol=1e-6, rtol=1e-5)


def test_a_row_that_sees_nothing_yields_zeros() -> None:
    k_BGND, v_BGND, position_BXN = shuffled_cache(2, 128, [0, 5], seed=0)
    q_BHD = torch.randn(2, 4, D)
    query_B1 = torch.tensor([[7], [7]])
    out_BHD, weights_BGRN = dense_step(
        q_BHD, k_BGND, v_BGND, visible(position_BXN, query_B1, None)[:, :, 0], SCALE
    )
    assert (out_BHD[0] == 0).all()
    assert (weights_BGRN[0] == 0).all()
    torch.testing.assert_close(weights_BGRN[1].sum(-1), torch.ones(2, 2))


def test_whole_and_partial_blocks_cover_exactly_what_is_visible() -> None:
    """Blocks left out hold nothing visible; whole ones hold nothing hidden."""
    generator = torch.Generator().manual_seed(0)
    for window in (None, 150, 400):
        position_BXN = torch.full((2, 2, 640), -1, dtype=torch.int32)
        position_BXN[0, :, :600] = torch.arange(600, dtype=torch.int32)
        position_BXN[0, 1, 100:300] = -1
        used = torch.randperm(640, generator=generator)[:300]
        position_BXN[1, :, used] = torch.arange(300, dtype=torch.int32)
        query_BT = torch.stack([torch.arange(300, 600), torch.arange(0, 300)])
        mask = whole_mask(position_BXN, query_BT, window)
        blocks = torch.nn.functional.pad(visible(position_BXN, query_BT, window), (0, 0, 0, 84))
        blocks = blocks.unflatten(2, (3, 128)).unflatten(4, (5, 128))
        for b, q in ((b, q) for b in range(2) for q in range(3)):
            assert mask.full_kv_num_blocks is not None
            assert mask.full_kv_indices is not None
            partial = mask.kv_indices[b, 0, q, : int(mask.kv_num_blocks[b, 0, q])].tolist()
            whole = mask.full_kv_indices[b, 0, q, : int(mask.full_kv_num_blocks[b, 0, q])].tolist()
            assert not set(partial) & set(whole)
            for n in range(5):
                seen = blocks[b, :, q, :, n]
                assert n in partial + whole or not seen.any()
                assert n not in whole or seen.all()


def test_the_backend_is_chosen_in_one_place() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_backend("auto", cpu, torch.bfloat16, True) == "dense"
    assert choose_backend("auto", cuda, torch.bfloat16, True) == "flex"
    assert choose_backend("auto", cuda, torch.bfloat16, False) == "dense"
    assert choose_backend("flex", cpu, torch.float32, False) == "flex"
    with pytest.raises(ValueError, match="compile=True"):
        choose_backend("flex", cpu, torch.bfloat16, False)
    with pytest.raises(ValueError, match="'paged'"):
        choose_backend("paged", cpu, torch.float32, True)
