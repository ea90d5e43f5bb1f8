"""Decode attention in plain torch: the test's yardstick, and the path that runs on a CPU.

Row by row over exactly the row's own tokens. On a CPU that is as fast as one padded call, needs no
mask (an unwritten cache slot may hold NaN), and a row's bits cannot depend on its batch mates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    context_len_B: Tensor,
    scale: float,
) -> Tensor:
    """See `megatron_rl.kernels.decode_attention.decode_attention`."""
    block_size, groups = k_cache.shape[1], k_cache.shape[2]
    out_BHD = torch.zeros_like(q_BHD, memory_format=torch.contiguous_format)
    for row, context in enumerate(context_len_B.tolist()):
        if context == 0:
            continue
        blocks = block_table_BN[row, : -(-context // block_size)]
        k_GnD = _tokens(k_cache, blocks, context)
        v_GnD = _tokens(v_cache, blocks, context)
        # The R query heads of a KV head are R queries of one attention over its tokens.
        q_GRD = q_BHD[row].unflatten(0, (groups, -1))
        out_GRD = F.scaled_dot_product_attention(q_GRD[None], k_GnD, v_GnD, scale=scale)[0]
        out_BHD[row] = out_GRD.flatten(0, 1)
    return out_BHD


def _tokens(cache: Tensor, blocks: Tensor, context: int) -> Tensor:
    """The first `context` tokens of a block list, as `[1, G, context, D]`."""
    return cache.index_select(0, blocks).flatten(0, 1)[:context].transpose(0, 1)[None]
