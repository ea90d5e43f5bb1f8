"""Decode attention in plain torch: the test's yardstick, and the path that runs on a CPU.

Row by row over exactly the row's own tokens. On a CPU that is as fast as one padded call, needs no
mask (an unwritten cache slot may hold NaN), and a row's bits cannot depend on its batch mates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rope_kv_write import reference as rope_kv_write


def decode_attention(
    q_BGRD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    context_len_B: Tensor,
    scale: float,
    *,
    new=None,
    window: int | None = None,
) -> Tensor:
    """See `megatron_rl.kernels.decode_attention.decode_attention`."""
    block_size, groups = k_cache.shape[1], k_cache.shape[2]
    if new is not None:
        q_BGRD = _write(q_BGRD, k_cache, v_cache, block_table_BN, context_len_B, new)
    out_BHD = q_BGRD.new_zeros((len(q_BGRD), groups * q_BGRD.shape[2], q_BGRD.shape[3]))
    for row, context in enumerate(context_len_B.tolist()):
        if context == 0:
            continue
        first = 0 if window is None else max(context - window, 0)
        skipped = first // block_size
        blocks = block_table_BN[row, skipped : -(-context // block_size)]
        seen = slice(first - skipped * block_size, context - skipped * block_size)
        k_GnD = _tokens(k_cache, blocks, seen)
        v_GnD = _tokens(v_cache, blocks, seen)
        # The R query heads of a KV head are R queries of one attention over its tokens.
        q_1GRD = q_BGRD[row][None]
        out_GRD = F.scaled_dot_product_attention(q_1GRD, k_GnD, v_GnD, scale=scale)[0]
        out_BHD[row] = out_GRD.flatten(0, 1)
    return out_BHD


def _write(
    q_BGRD: Tensor, k_cache: Tensor, v_cache: Tensor, table_BN: Tensor, context_B: Tensor, new
) -> Tensor:
    """Writes the last token of each context; the rotated queries `[B, G, R, D]`."""
    size = k_cache.shape[1]
    position_B = (context_B.long() - 1).clamp(min=0)
    block_B = table_BN.gather(1, (position_B // size)[:, None])[:, 0].long()
    slot_B = torch.where(context_B > 0, block_B * size + position_B % size, -1)
    q_BHD, _ = rope_kv_write.rope_kv_write(
        q_BGRD, new.k_BGD, new.v_BGD, new.cos_sin_PR, position_B, k_cache, v_cache, slot_B
    )
    return q_BHD.unflatten(1, q_BGRD.shape[1:3])


def _tokens(cache: Tensor, blocks: Tensor, seen: slice) -> Tensor:
    """The seen tokens of a block list, as `[1, G, n, D]`."""
    return cache.index_select(0, blocks).flatten(0, 1)[seen].transpose(0, 1)[None]
