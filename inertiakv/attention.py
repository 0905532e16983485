"""Attention over slots: dense, or FlexAttention with block masks.

One mask rule for everything: slot n is seen by a query at position p iff 0 <= position[n] <= p, and p -
position[n] < window where the layer has a sliding window. A query at position -1 (padding, a finished row)
sees nothing and yields zeros. With it prefill, ragged batches, decoding and a further turn are one operation
with another T.

Shape letters: B batch, T query tokens, H query heads, G KV heads, R query heads a KV head (H = G * R), X
retention sets (1, or one for each KV head), N slots, D head dim, Q and K blocks of queries and of slots, C
splits of the slots, M slots in each.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .cache import MASK_BLOCK
from .lowering import computed_first

Backend = Literal["dense", "flex"]
BlockLists = tuple[Tensor, Tensor, Tensor, Tensor]
"""FlexAttention's form of a mask of blocks: of those that are seen in part, and of those seen whole, for each
block of queries how many and which, int32 [B, 1, Q] and [B, 1, Q, K]."""


class Softmax(NamedTuple):
    """What the softmax of some models has beside a scale. It is dense, in float32 or wider."""

    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""
    sink_H: Tensor | None = None
    """A logit that belongs to no token."""


SPLITS = 8
"""Parts of the slots that a compiled step attends to side by side."""
FEW_QUERIES = 32
"""Queries whose logits over thousands of slots fit into a core's cache."""
QUERY_BLOCK = 256
"""Queries that dense prefill masks at a time: a [T, N] mask is never made whole."""


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, compiled: bool) -> Backend:
    """The backend for `auto`, `dense` or `flex`. The only place that decides.

    On CPUs dense attention is several times faster for one query, and it has the weights anyway; on CUDA
    FlexAttention skips empty blocks and keeps no logits. Uncompiled FlexAttention is a reference for float32
    only: in low precision it rounds its logits (ValueError).
    """
    if name not in ("auto", "dense", "flex"):
        raise ValueError(f"unknown attention {name!r}; choose from auto, dense, flex")
    if name == "auto":
        return "flex" if device.type == "cuda" and compiled else "dense"
    if name == "flex" and not compiled and dtype.itemsize < 4:
        raise ValueError(f"attention='flex' in {dtype} needs compile=True: uncompiled, it rounds its logits")
    return name  # type: ignore[return-value]


def visible(position_BXN: Tensor, query_BT: Tensor, window: int | None) -> Tensor:
    """The mask rule, bool [B, X, T, N]."""
    key_BX1N, query_B1T1 = position_BXN[:, :, None], query_BT[:, None, :, None]
    seen_BXTN = (key_BX1N >= 0) & (key_BX1N <= query_B1T1)
    return seen_BXTN if window is None else seen_BXTN & (query_B1T1 - key_BX1N < window)


def dense_weights(q_BHD: Tensor, k_BGND: Tensor, visible_BXN: Tensor, scale: float) -> Tensor:
    """One query's softmax over the visible slots, [B, G, R, N], in float32 or wider; zeros where it sees
    none."""
    mass_BGRN, total_BGR1 = _masses(q_BHD, k_BGND, visible_BXN, scale)
    return mass_BGRN / total_BGR1


def dense_step(
    q_BHD: Tensor, k_BGND: Tensor, v_BGND: Tensor, visible_BXN: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one query a row: the output [B, H, D] and the weights [B, G, R, N] that made it."""
    if not torch.compiler.is_compiling() and k_BGND.device.type == "cpu" and len(q_BHD) > 1:
        # Row by row: a whole batch's K and V in float32 take longer to be given memory than to be used.
        rows = zip(*(x.split(1) for x in (q_BHD, k_BGND, v_BGND, visible_BXN)), strict=True)
        outs, weights = zip(*(dense_step(q, k, v, seen, scale) for q, k, v, seen in rows), strict=True)
        return torch.cat(outs), torch.cat(weights)
    mass_BGRN, total_BGR1 = _masses(q_BHD, k_BGND, visible_BXN, scale)
    if _fuses(k_BGND):
        mass_BGRCM = mass_BGRN.unflatten(-1, (SPLITS, -1))
        v_BGCMD = v_BGND.unflatten(2, (SPLITS, -1)).to(mass_BGRN.dtype)
        out_BGRD = torch.stack(
            [(w_BGCM[..., None] * v_BGCMD).sum(-2).sum(2) for w_BGCM in mass_BGRCM.unbind(2)], dim=2
        )
    else:
        out_BGRD = torch.matmul(mass_BGRN, v_BGND.to(mass_BGRN.dtype))
    return (out_BGRD / total_BGR1).flatten(1, 2).to(q_BHD.dtype), mass_BGRN / total_BGR1


def observed(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    visible_BXTN: Tensor,
    scale: float,
    softmax: Softmax | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of several queries a row, [B, H, T, D], and its weights [B, G, R * T, N], as if every query
    had heads of its own. In float32 or wider, row by row."""
    softcap, sink_H = Softmax() if softmax is None else softmax
    accurate = torch.promote_types(q_BHTD.dtype, torch.float32)
    outs, weights = [], []
    for q_HTD, k_GND, v_GND, seen_XTN in zip(q_BHTD, k_BGND, v_BGND, visible_BXTN, strict=True):
        q_GRTD = q_HTD.unflatten(0, (len(k_GND), -1)).to(accurate)
        logits_GRTN = torch.matmul(q_GRTD, k_GND.to(accurate).mT[:, None]) * scale
        if softcap is not None:
            logits_GRTN = softcap * torch.tanh(logits_GRTN / softcap)
        logits_GRTN = torch.where(seen_XTN[:, None], logits_GRTN, -torch.inf)
        if sink_H is not None:
            sink_GRT1 = sink_H.view(len(k_GND), -1, 1, 1).to(accurate).expand(*logits_GRTN.shape[:3], 1)
            logits_GRTN = torch.cat((logits_GRTN, sink_GRT1), dim=-1)
        weights_GRTN = logits_GRTN.softmax(-1)[..., : k_GND.shape[1]]
        weights_GRTN = torch.where(seen_XTN.any(-1)[:, None, :, None], weights_GRTN, 0.0)
        outs.append(torch.matmul(weights_GRTN, v_GND.to(accurate)[:, None]).flatten(0, 1))
        weights.append(weights_GRTN.flatten(1, 2))
    return torch.stack(outs).to(q_BHTD.dtype), torch.stack(weights)


def most_attention(
    q_BHTD: Tensor, k_BGND: Tensor, position_BXN: Tensor, query_BT: Tensor, window: int | None, scale: float
) -> Tensor:
    """The most that any query of any head of a KV head pays to each token, [B, G, N], softmax over what the
    query sees of these tokens. In float32 or wider, row by row and a few queries at a time, whose logits stay
    in a core's cache."""
    accurate = torch.promote_types(q_BHTD.dtype, torch.float32)
    most_BGN = []
    for q_HTD, k_GND, position_XN, query_T in zip(q_BHTD, k_BGND, position_BXN, query_BT, strict=True):
        q_GRTD, k_G1DN = (
            q_HTD.unflatten(0, (len(k_GND), -1)).to(accurate) * scale,
            k_GND.to(accurate).mT[:, None],
        )
        most_GN = k_G1DN.new_full(k_GND.shape[:2], -torch.inf)
        for q_GRtD, query_t in zip(q_GRTD.split(FEW_QUERIES, 2), query_T.split(FEW_QUERIES), strict=True):
            hidden_XtN = ~visible(position_XN[None], query_t[None], window)[0]
            logits_GRtN = torch.matmul(q_GRtD, k_G1DN).masked_fill_(hidden_XtN[:, None], -torch.inf)
            lse_GRt1 = logits_GRtN.logsumexp(-1, keepdim=True)
            lse_GRt1 = lse_GRt1.masked_fill(lse_GRt1 == -torch.inf, torch.inf)
            most_GN = torch.maximum(most_GN, logits_GRtN.sub_(lse_GRt1).amax((1, 2)))
        most_BGN.append(most_GN.exp())
    return torch.stack(most_BGN)


def dense_chunk(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    position_BXN: Tensor,
    query_BT: Tensor,
    window: int | None,
    scale: float,
    end_slot: int,
    start_slot: int | None = None,
    softmax: Softmax | None = None,
) -> Tensor:
    """Attention of a chunk of queries, [B, H, T, D].

    The chunk's own tokens must lie in order in the slots before `end_slot` (in the row where they reach
    furthest). `start_slot`: given where they begin at the same slot in every row, and all slots before it
    hold tokens that are older.
    """
    plain = window is None and softmax is None
    if start_slot is not None and plain and q_BHTD.device.type == "cpu":
        out_BHTD = _unmasked_chunk(q_BHTD, k_BGND, v_BGND, scale, start_slot)
    else:
        seen = (position_BXN, query_BT, window)
        out_BHTD = _masked_chunk(q_BHTD, k_BGND, v_BGND, *seen, scale, end_slot, softmax)
    return torch.where((query_BT >= 0)[:, None, :, None], out_BHTD, 0.0)


def _unmasked_chunk(q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, scale: float, start_slot: int) -> Tensor:
    """Attention of a chunk to the older tokens, all of them, and to its own, in order: on CPUs a mask would
    take up to half of the time. The two parts meet by their log-sum-exps."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own = slice(start_slot, start_slot + q_BHTD.shape[2])
    out_BHTD, lse_BHT = flash(q_BHTD, k_BGND[:, :, own], v_BGND[:, :, own], is_causal=True, scale=scale)
    if start_slot == 0:
        return out_BHTD
    old_BHTD, old_lse_BHT = flash(q_BHTD, k_BGND[:, :, :start_slot], v_BGND[:, :, :start_slot], scale=scale)
    share_BHT1 = torch.sigmoid(old_lse_BHT - lse_BHT)[..., None]
    accurate = share_BHT1.dtype
    return torch.lerp(out_BHTD.to(accurate), old_BHTD.to(accurate), share_BHT1).to(q_BHTD.dtype)


def _masked_chunk(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    position_BXN: Tensor,
    query_BT: Tensor,
    window: int | None,
    scale: float,
    end_slot: int,
    softmax: Softmax | None,
) -> Tensor:
    """Attention of a chunk under the mask rule, a block of queries at a time; a block leaves out the slots of
    the tokens that come after it."""
    total, slots = q_BHTD.shape[2], k_BGND.shape[2]
    blocks = []
    for start in range(0, total, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, total)
        keys = min(slots, end_slot - (total - end))
        seen_BXTN = visible(position_BXN[..., :keys], query_BT[:, start:end], window)
        qkv = (q_BHTD[:, :, start:end], k_BGND[:, :, :keys], v_BGND[:, :, :keys])
        if softmax is not None:
            blocks.append(observed(*qkv, seen_BXTN, scale, softmax)[0])
            continue
        if seen_BXTN.shape[1] > 1:
            seen_BXTN = seen_BXTN.repeat_interleave(q_BHTD.shape[1] // k_BGND.shape[1], dim=1)
        blocks.append(F.scaled_dot_product_attention(*qkv, attn_mask=seen_BXTN, scale=scale, enable_gqa=True))
    return torch.cat(blocks, dim=2)


def block_lists(position_BXN: Tensor, query_BT: Tensor, window: int | None) -> BlockLists:
    """The mask rule for whole blocks, from each block's smallest and largest positions: O(N + T) memory, in
    graph. Blocks of one mask for all sets: seen whole where they are in every set, in part where in any."""
    lo_key_BX1K, hi_key_BX1K = (key_BXK[:, :, None] for key_BXK in _block_range(position_BXN))
    lo_query_B1Q1, hi_query_B1Q1 = (query_BQ[:, None, :, None] for query_BQ in _block_range(query_BT))
    some_BXQK = (lo_key_BX1K <= hi_query_B1Q1) & (hi_key_BX1K >= 0)
    # A block without holes, all of it at or before every one of its queries, needs no look at the table.
    whole_BXQK = (
        (hi_key_BX1K <= lo_query_B1Q1)
        & _block_full(position_BXN)[:, :, None]
        & _block_full(query_BT)[:, None, :, None]
    )
    if window is not None:
        some_BXQK = some_BXQK & (lo_query_B1Q1 - hi_key_BX1K < window)
        whole_BXQK = whole_BXQK & (hi_query_B1Q1 - lo_key_BX1K < window)

    some_BQK, whole_BQK = some_BXQK.any(1), (some_BXQK & whole_BXQK).all(1)
    return *_block_list(some_BQK & ~whole_BQK), *_block_list(whole_BQK)


def flex_mask(
    blocks: BlockLists, position_BXN: Tensor, query_BT: Tensor, window: int | None, group: int
) -> BlockMask:
    """The mask rule as a BlockMask, its `block_lists` given. `group`: query heads of a KV head."""
    # A constant among the indices is nothing that the kernel for CUDA could be made with.
    position_BN = position_BXN[:, 0]
    single, of_set = position_BXN.shape[1] == 1, group + _missing_heads(group, query_BT)

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, slot: Tensor) -> Tensor:
        key = position_BN[b, slot] if single else position_BXN[b, h // of_set, slot]
        query = query_BT[b, q_index]
        seen = (key >= 0) & (key <= query)
        return seen if window is None else seen & (query - key < window)

    return BlockMask.from_kv_blocks(
        *blocks,
        BLOCK_SIZE=(MASK_BLOCK, MASK_BLOCK),
        mask_mod=mask_mod,
        seq_lengths=(query_BT.shape[1], position_BXN.shape[-1]),
        compute_q_blocks=False,
    )


def flex(q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """FlexAttention under a block mask, [B, H, T, D]."""
    return _flex(q_BHTD, k_BGND, v_BGND, mask, scale, None)[0]


def _flex(
    q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, mask: BlockMask, scale: float, aux: AuxRequest | None
) -> tuple[Tensor, Tensor | None]:
    """The output, and the log-sum-exp [B, H, T] where `aux` asks for it."""
    kv_heads, group = k_BGND.shape[1], q_BHTD.shape[1] // k_BGND.shape[1]
    missing = _missing_heads(group, q_BHTD[:, 0, :, 0])

    def real(x_BH: Tensor) -> Tensor:
        return x_BH.unflatten(1, (kv_heads, -1))[:, :, :group].flatten(1, 2) if missing else x_BH

    if missing:
        q_BHTD = F.pad(q_BHTD.unflatten(1, (kv_heads, -1)), (0, 0, 0, 0, 0, missing)).flatten(1, 2)
    found = flex_attention(
        q_BHTD, k_BGND, v_BGND, block_mask=mask, scale=scale, enable_gqa=True, return_aux=aux
    )
    if aux is None:
        assert isinstance(found, Tensor)
        return real(found), None
    out_BHTD, auxiliary = found
    assert isinstance(out_BHTD, Tensor)
    assert auxiliary.lse is not None
    return real(out_BHTD), real(auxiliary.lse)


def _missing_heads(group: int, query_BT: Tensor) -> int:
    """Query heads of zeros that FlexAttention is given with each KV head. Its CUDA kernel for single queries
    splits the slots among programs, and wants a power of two of heads; with 3 or 7 of them one program would
    walk through all slots."""
    single = query_BT.shape[1] == 1 and query_BT.device.type != "cpu"
    return -group % (1 << (group - 1).bit_length()) if single else 0


def flex_step(
    q_BHD: Tensor, k_BGND: Tensor, v_BGND: Tensor, mask: BlockMask, visible_BXN: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one query a row by FlexAttention: output [B, H, D] and weights [B, G, R, N], from a second
    pass over K with FlexAttention's log-sum-exp where the compiler can return it (not on CPUs)."""
    if q_BHD.device.type == "cpu":
        out_BHTD = flex(q_BHD[:, :, None], k_BGND, v_BGND, mask, scale)
        return out_BHTD[:, :, 0], dense_weights(q_BHD, k_BGND, visible_BXN, scale)
    out_BHTD, lse_BH1 = _flex(q_BHD[:, :, None], k_BGND, v_BGND, mask, scale, AuxRequest(lse=True))
    assert lse_BH1 is not None
    logits_BGRN = _logits(q_BHD, k_BGND, visible_BXN, scale)
    lse_BGR1 = rearrange(lse_BH1, "b (g r) 1 -> b g r 1", g=k_BGND.shape[1])
    weights_BGRN = torch.exp(logits_BGRN - torch.where(lse_BGR1 == -torch.inf, 0.0, lse_BGR1))
    return out_BHTD[:, :, 0], weights_BGRN


def _masses(q_BHD: Tensor, k_BGND: Tensor, visible_BXN: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query's softmax before its division: the numerators [B, G, R, N], and their sum [B, G, R, 1]."""
    logits_BGRN = _logits(q_BHD, k_BGND, visible_BXN, scale)
    # A row that sees nothing has no maximum: 0 in its place makes every weight exp(-inf) = 0.
    top_BGR1 = logits_BGRN.amax(-1, keepdim=True)
    mass_BGRN = torch.exp(logits_BGRN - torch.where(top_BGR1 == -torch.inf, 0.0, top_BGR1))
    if _fuses(k_BGND):
        mass_BGRN = computed_first(mass_BGRN)
    return mass_BGRN, mass_BGRN.sum(-1, keepdim=True).clamp_min(torch.finfo(mass_BGRN.dtype).tiny)


def _logits(q_BHD: Tensor, k_BGND: Tensor, visible_BXN: Tensor, scale: float) -> Tensor:
    accurate = torch.promote_types(q_BHD.dtype, torch.float32)
    q_BGRD = rearrange(q_BHD, "b (g r) d -> b g r d", g=k_BGND.shape[1]).to(accurate)
    if _fuses(k_BGND):
        if k_BGND.device.type == "cpu":
            # Queries in float32 and a mask of floats, made once: the loops would make them anew for every
            # slot and every head, which takes them longer than the products.
            q_BGRD, visible_BXN = computed_first(q_BGRD), computed_first(visible_BXN.to(accurate)) > 0
        k_BGCMD = k_BGND.unflatten(2, (SPLITS, -1)).to(accurate)
        logits_BGRCM = torch.stack(
            [(q_BGD[:, :, None, None] * k_BGCMD).sum(-1) for q_BGD in q_BGRD.unbind(2)], dim=2
        )
        logits_BGRN = logits_BGRCM.flatten(3) * scale
    else:
        logits_BGRN = torch.matmul(q_BGRD, k_BGND.to(accurate).mT) * scale
    return torch.where(visible_BXN[:, :, None], logits_BGRN, -torch.inf)


def _fuses(k_BGND: Tensor) -> bool:
    """Whether to write the two products of one query's attention as multiplications and sums, one for each
    query head of a KV head: the compiler then makes loops, or one CUDA kernel, of its own, which read K and V
    once for all these heads, as they are, split so that all threads have work. The library's matrix product
    wants a float32 copy first."""
    return torch.compiler.is_compiling() and k_BGND.shape[2] % SPLITS == 0


def _blocks(position_P: Tensor) -> Tensor:
    """Positions [..., P] cut into mask blocks, [..., blocks, positions of a block], the last one filled up
    with -1. Fewer than a block of them are one, as they are."""
    size = min(MASK_BLOCK, position_P.shape[-1])
    return F.pad(position_P, (0, -position_P.shape[-1] % size), value=-1).unflatten(-1, (-1, size))


def _block_range(position_P: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest position in each block; -1 is no position, and a block without any gets (big,
    -1)."""
    blocks = _blocks(position_P)
    return torch.where(blocks < 0, torch.iinfo(blocks.dtype).max, blocks).amin(-1), blocks.amax(-1)


def _block_full(position_P: Tensor) -> Tensor:
    return (_blocks(position_P) >= 0).all(-1)


def _block_list(chosen_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a set of blocks: how many, and their indices first."""
    chosen_B1QK = chosen_BQK[:, None].to(torch.int32)
    order = chosen_B1QK.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return chosen_B1QK.sum(-1, dtype=torch.int32), order
