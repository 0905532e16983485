"""Attention by matrix products and softmax over the slots.

Shape letters: B batch, T query tokens, H query heads, G KV heads, R query heads a KV head (H = G * R), X
retention sets (1, or one for each KV head), N slots, D head dim, C splits of the slots, M slots in each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..compiling.numerics import accumulation_dtype, materialize
from .mask import visible


class Softmax(NamedTuple):
    """Extras of some models' softmax. They run dense, in float32 or wider."""

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


def dense_weights(q_BHD: Tensor, k_BGND: Tensor, visible_BXN: Tensor, scale: float) -> Tensor:
    """One query's softmax over the visible slots, [B, G, R, N], in float32 or wider; zeros where it sees
    none."""
    mass_BGRN, total_BGR1 = _masses(q_BHD, k_BGND, visible_BXN, scale)
    return mass_BGRN / total_BGR1


def observed(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    visible_BXTN: Tensor,
    scale: float,
    softmax: Softmax | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of several queries per row: the output [B, H, T, D] and the weights [B, G, R * T, N], in
    float32 or wider. Row by row, to bound memory."""
    outs, weights_BGRN = [], None
    rows = zip(q_BHTD, k_BGND, v_BGND, visible_BXTN, strict=True)
    for row, (q_HTD, k_GND, v_GND, seen_XTN) in enumerate(rows):
        weights_GRN = _observed_weights(
            q_HTD, k_GND, seen_XTN, scale, Softmax() if softmax is None else softmax
        )
        out_GRD = torch.matmul(weights_GRN, v_GND.to(weights_GRN.dtype))
        outs.append(out_GRD.reshape(q_HTD.shape))
        if len(q_BHTD) == 1:
            weights_BGRN = weights_GRN[None]
        elif weights_BGRN is None:
            weights_BGRN = weights_GRN.new_empty(len(q_BHTD), *weights_GRN.shape)
        if len(q_BHTD) > 1:
            weights_BGRN[row] = weights_GRN
        del weights_GRN  # before the next row's are made
    assert weights_BGRN is not None
    return torch.stack(outs).to(q_BHTD.dtype), weights_BGRN


def _observed_weights(
    q_HTD: Tensor, k_GND: Tensor, seen_XTN: Tensor, scale: float, softmax: Softmax
) -> Tensor:
    """Of one row, [G, R * T, N]. Queries of a KV head are one matrix, and what can be is changed in place:
    with thousands of slots each further copy takes as much as the cache does."""
    softcap, sink_H = softmax
    (heads, slots), queries = k_GND.shape[:2], q_HTD.shape[1]
    accurate = accumulation_dtype(q_HTD.dtype)
    q_GRD = q_HTD.unflatten(0, (heads, -1)).flatten(1, 2).to(accurate)
    logits_GRTN = torch.matmul(q_GRD, k_GND.to(accurate).mT).mul_(scale).unflatten(1, (-1, queries))
    if softcap is not None:
        logits_GRTN = logits_GRTN.div_(softcap).tanh_().mul_(softcap)
    logits_GRTN.masked_fill_(~seen_XTN[:, None], -torch.inf)
    if sink_H is not None:
        sink_GRT1 = sink_H.view(heads, -1, 1, 1).to(accurate).expand(*logits_GRTN.shape[:3], 1)
        logits_GRTN = torch.cat((logits_GRTN, sink_GRT1), dim=-1)
    weights_GRTN = logits_GRTN.softmax(-1)[..., :slots]
    weights_GRTN.masked_fill_(~seen_XTN.any(-1)[:, None, :, None], 0.0)
    return weights_GRTN.flatten(1, 2)


def most_attention(
    q_BHTD: Tensor, k_BGND: Tensor, position_BXN: Tensor, query_BT: Tensor, window: int | None, scale: float
) -> Tensor:
    """The maximum attention that any query of a KV head pays to each token, [B, G, N]; softmax over the
    visible ones of these tokens, in float32 or wider. A few queries at a time, so that their logits stay in
    a core's cache."""
    accurate = accumulation_dtype(q_BHTD.dtype)
    most_BGN = []
    for q_HTD, k_GND, position_XN, query_T in zip(q_BHTD, k_BGND, position_BXN, query_BT, strict=True):
        q_GRTD = q_HTD.unflatten(0, (len(k_GND), -1)).to(accurate) * scale
        k_GDN = k_GND.to(accurate).mT
        most_GN = k_GDN.new_full(k_GND.shape[:2], -torch.inf)
        for q_GRtD, query_t in zip(q_GRTD.split(FEW_QUERIES, 2), query_T.split(FEW_QUERIES), strict=True):
            hidden_XtN = ~visible(position_XN[None], query_t[None], window)[0]
            # The queries of a KV head as one matrix: else K would be copied for each.
            logits_GRtN = torch.matmul(q_GRtD.flatten(1, 2), k_GDN).unflatten(1, q_GRtD.shape[1:3])
            logits_GRtN.masked_fill_(hidden_XtN[:, None], -torch.inf)
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
    slots_used: int,
    slots_before: int | None = None,
    softmax: Softmax | None = None,
) -> Tensor:
    """Attention of a chunk of queries, [B, H, T, D].

    The chunk's own tokens must lie in order, at the end of the first `slots_used` slots in the row with the
    most. `slots_before`: how many slots hold older tokens, where it is the same in every row.
    """
    plain = window is None and softmax is None
    if slots_before is not None and plain and q_BHTD.device.type == "cpu":
        out_BHTD = _unmasked_chunk(q_BHTD, k_BGND, v_BGND, scale, slots_before)
    else:
        total, slots, blocks = q_BHTD.shape[2], k_BGND.shape[2], []
        for start in range(0, total, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, total)
            keys = min(slots, slots_used - (total - end))  # without those of later blocks
            seen = (position_BXN[..., :keys], query_BT[:, start:end], window)
            qkv = (q_BHTD[:, :, start:end], k_BGND[:, :, :keys], v_BGND[:, :, :keys])
            # A mask has no name here, and is gone before the blocks are joined.
            if softmax is not None:
                blocks.append(observed(*qkv, visible(*seen), scale, softmax)[0])
            else:
                blocks.append(_masked(*qkv, visible(*seen), scale))
        out_BHTD = torch.cat(blocks, dim=2)
    return torch.where((query_BT >= 0)[:, None, :, None], out_BHTD, 0.0)


def _masked(q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, seen_BXTN: Tensor, scale: float) -> Tensor:
    """Attention under a mask, set by set: one mask for all heads together would be as large as their
    logits."""
    sets = seen_BXTN.shape[1]
    parts = zip(*(x.chunk(sets, dim=1) for x in (q_BHTD, k_BGND, v_BGND, seen_BXTN)), strict=True)
    outs = [
        F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        for q, k, v, seen in parts
    ]
    return outs[0] if sets == 1 else torch.cat(outs, dim=1)


def _unmasked_chunk(q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, scale: float, before: int) -> Tensor:
    """Attention of a chunk without a mask, which takes up to half of the time on CPUs: once over all older
    tokens, once causally over its own, merged by log-sum-exp."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own = slice(before, before + q_BHTD.shape[2])
    out_BHTD, lse_BHT = flash(q_BHTD, k_BGND[:, :, own], v_BGND[:, :, own], is_causal=True, scale=scale)
    if before == 0:
        return out_BHTD
    old_BHTD, old_lse_BHT = flash(q_BHTD, k_BGND[:, :, :before], v_BGND[:, :, :before], scale=scale)
    share_BHT1 = torch.sigmoid(old_lse_BHT - lse_BHT)[..., None]
    accurate = share_BHT1.dtype
    return torch.lerp(out_BHTD.to(accurate), old_BHTD.to(accurate), share_BHT1).to(q_BHTD.dtype)


def _masses(q_BHD: Tensor, k_BGND: Tensor, visible_BXN: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query's softmax before the division: numerators [B, G, R, N] and their sum [B, G, R, 1]."""
    logits_BGRN = logits(q_BHD, k_BGND, visible_BXN, scale)
    # A row that sees nothing has no maximum: 0 in its place makes every weight exp(-inf) = 0.
    top_BGR1 = logits_BGRN.amax(-1, keepdim=True)
    mass_BGRN = torch.exp(logits_BGRN - torch.where(top_BGR1 == -torch.inf, 0.0, top_BGR1))
    if _fuses(k_BGND):
        mass_BGRN = materialize(mass_BGRN)
    return mass_BGRN, mass_BGRN.sum(-1, keepdim=True).clamp_min(torch.finfo(mass_BGRN.dtype).tiny)


def logits(q_BHD: Tensor, k_BGND: Tensor, visible_BXN: Tensor, scale: float) -> Tensor:
    accurate = accumulation_dtype(q_BHD.dtype)
    q_BGRD = rearrange(q_BHD, "b (g r) d -> b g r d", g=k_BGND.shape[1]).to(accurate)
    if _fuses(k_BGND):
        if k_BGND.device.type == "cpu":
            # Queries in float32 and a mask of floats, made once: the loops would make them anew for every
            # slot and every head, which takes them longer than the products.
            q_BGRD, visible_BXN = materialize(q_BGRD), materialize(visible_BXN.to(accurate)) > 0
        k_BGCMD = k_BGND.unflatten(2, (SPLITS, -1)).to(accurate)
        logits_BGRCM = torch.stack(
            [(q_BGD[:, :, None, None] * k_BGCMD).sum(-1) for q_BGD in q_BGRD.unbind(2)], dim=2
        )
        logits_BGRN = logits_BGRCM.flatten(3) * scale
    else:
        logits_BGRN = torch.matmul(q_BGRD, k_BGND.to(accurate).mT) * scale
    return torch.where(visible_BXN[:, :, None], logits_BGRN, -torch.inf)


def _fuses(k_BGND: Tensor) -> bool:
    """Whether to write the two products of one query's attention as multiplications and sums. The compiler
    makes loops of them, or one CUDA kernel, that read K and V once for all query heads of a KV head, split
    over threads. A library product would need a float32 copy first."""
    return torch.compiler.is_compiling() and k_BGND.shape[2] % SPLITS == 0
