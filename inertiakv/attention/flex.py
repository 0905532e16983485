"""FlexAttention with block masks made from the slots' positions.

Shape letters: B batch, T query tokens, H query heads, G KV heads, R query heads a KV head (H = G * R), X
retention sets (1, or one for each KV head), N slots, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..cache.slot_cache import MASK_BLOCK
from .dense import dense_weights, logits
from .mask import BlockLists


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
    """How many zero query heads to add to each KV head. FlexAttention's CUDA kernel for single queries
    splits the slots among programs only where the group is a power of two."""
    single = query_BT.shape[1] == 1 and query_BT.device.type != "cpu"
    return -group % (1 << (group - 1).bit_length()) if single else 0


def flex_step(
    q_BHD: Tensor, k_BGND: Tensor, v_BGND: Tensor, mask: BlockMask, visible_BXN: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row by FlexAttention: output [B, H, D] and weights [B, G, R, N]. The
    weights take a second pass over K, with FlexAttention's log-sum-exp where the compiler can return it
    (not on CPUs)."""
    if q_BHD.device.type == "cpu":
        out_BHTD = flex(q_BHD[:, :, None], k_BGND, v_BGND, mask, scale)
        return out_BHTD[:, :, 0], dense_weights(q_BHD, k_BGND, visible_BXN, scale)
    out_BHTD, lse_BH1 = _flex(q_BHD[:, :, None], k_BGND, v_BGND, mask, scale, AuxRequest(lse=True))
    assert lse_BH1 is not None
    logits_BGRN = logits(q_BHD, k_BGND, visible_BXN, scale)
    lse_BGR1 = rearrange(lse_BH1, "b (g r) 1 -> b g r 1", g=k_BGND.shape[1])
    weights_BGRN = torch.exp(logits_BGRN - torch.where(lse_BGR1 == -torch.inf, 0.0, lse_BGR1))
    return out_BHTD[:, :, 0], weights_BGRN
