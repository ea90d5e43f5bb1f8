"""Attention of one new token per sequence over a paged KV cache.

    out[b, h] = Σ_n softmax_n(scale · q[b, h] · K[b, n, h // R]) · V[b, n, h // R],  n < context[b]

with R = query heads per KV head (grouped-query attention, Ainslie et al. 2023) and keys and values
found through a block table (Kwon et al. 2023, PagedAttention).

Shapes: B sequences, H query heads, G KV heads, D head dimension, N blocks a sequence may hold,
S tokens a block holds.
"""

from __future__ import annotations

from torch import Tensor

from ..backend import use_triton
from . import reference

__all__ = ["decode_attention"]

MAX_HEAD_DIM = 256


def decode_attention(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    context_len_B: Tensor,
    scale: float,
    *,
    split_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Decode attention over a paged KV cache.

    Args:
        q_BHD: `[B, H, D]` bf16, fp16 or fp32, last dimension contiguous.
        k_cache, v_cache: `[blocks, S, G, D]`, the same dtype as q, S a power of two, last
            dimension contiguous; the other strides are free, so a `[blocks, G, S, D]` store
            passes as its transposed view.
        block_table_BN: int32 `[B, N]`, block numbers in token order. Only the first
            ceil(context / S) entries of a row are read. A narrower view costs fewer programs.
        context_len_B: int32 `[B]`, tokens to attend to, the new one included, at most N · S.
            0 gives a row of zeros (a padding row of a captured graph).
        scale: factor on q · k, usually D^-0.5.
        split_size: tokens one program walks before its partial result is merged with the others'.
            None picks 512. A row's bits depend on this number and on nothing else in the batch;
            a value ≥ N · S never splits, as a plain full-attention pass walks.
        backend: `auto`, `triton` or `torch`. The torch path reads the lengths on the host.

    Returns:
        `[B, H, D]` in q's dtype, accumulated in fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    _check(q_BHD, k_cache, v_cache, block_table_BN, context_len_B)
    if use_triton("decode_attention", q_BHD, backend):
        from . import kernel

        return kernel.decode_attention(
            q_BHD, k_cache, v_cache, block_table_BN, context_len_B, scale, split_size=split_size
        )
    return reference.decode_attention(q_BHD, k_cache, v_cache, block_table_BN, context_len_B, scale)


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, context: Tensor) -> None:
    if q.ndim != 3 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            "decode_attention wants q [B, H, D] and equal caches [blocks, S, G, D], got "
            f"{tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    batch, heads, dim = q.shape
    _, block_size, groups, cache_dim = k_cache.shape
    if dim != cache_dim or dim > MAX_HEAD_DIM or dim % 16:
        raise ValueError(
            f"head dimensions {dim} (q) and {cache_dim} (cache) must be equal, a multiple of 16 "
            f"and at most {MAX_HEAD_DIM}"
        )
    if heads % groups:
        raise ValueError(f"{heads} query heads are not a multiple of {groups} KV heads")
    if block_size & (block_size - 1):
        raise ValueError(f"block size {block_size} is not a power of two")
    if table.ndim != 2 or len(table) != batch or context.shape != (batch,):
        raise ValueError(
            f"{batch} sequences need a block table [{batch}, N] and {batch} lengths, got "
            f"{tuple(table.shape)} and {tuple(context.shape)}"
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype or not q.is_floating_point():
        raise ValueError(
            f"q ({q.dtype}), keys ({k_cache.dtype}) and values ({v_cache.dtype}) must share one "
            "floating dtype"
        )
    if len({x.device for x in (q, k_cache, v_cache, table, context)}) > 1:
        raise ValueError("q, the caches, the block table and the lengths must share one device")
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache)):
        raise ValueError("the last dimension of q and of the caches must be contiguous")
