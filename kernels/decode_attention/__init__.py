"""Attention of one new token per sequence over a paged KV cache.

    out[b, h] = Σ_n softmax_n(scale · q[b, h] · K[b, n, h // R]) · V[b, n, h // R],
    context[b] − window ≤ n < context[b]

with R = query heads per KV head (grouped-query attention, Ainslie et al. 2023), keys and values
found through a block table (Kwon et al. 2023, PagedAttention), and the last `window` tokens seen
(sliding window attention, Beltagy et al. 2020), or all.

With `new`, the call also takes what the fused projection has just made: it rotates the queries and
the new keys (see megatron_rl.kernels.rope_kv_write), writes the new keys and values to the cache,
and attends.

Shapes: B sequences, H query heads, G KV heads, D head dimension, N blocks a sequence may hold,
S tokens a block holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backend import use_triton
from . import reference

__all__ = ["NewToken", "decode_attention"]

MAX_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class NewToken:
    """What one new token per sequence brings, not rotated yet.

    Attributes:
        k_BGD, v_BGD: its keys and values, in q's dtype, last dimension contiguous.
        cos_sin_PR: fp32 `[P, R]`, `rope_table` of megatron_rl.kernels.rope_kv_write; P at least
            the longest context.
    """

    k_BGD: Tensor
    v_BGD: Tensor
    cos_sin_PR: Tensor


def decode_attention(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    context_len_B: Tensor,
    scale: float,
    *,
    new: NewToken | None = None,
    window: int | None = None,
    split_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Decode attention over a paged KV cache.

    Args:
        q_BHD: `[B, H, D]` bf16, fp16 or fp32, last dimension contiguous; or `[B, G, H/G, D]`, as
            it lies in an output fused by KV head.
        k_cache, v_cache: `[blocks, S, G, D]`, the same dtype as q, S a power of two, last
            dimension contiguous; the other strides are free, so a `[blocks, G, S, D]` store
            passes as its transposed view.
        block_table_BN: int32 `[B, N]`, block numbers in token order. Only the first
            ceil(context / S) entries of a row are read, and none of blocks before the window. A
            narrower view costs fewer programs.
        context_len_B: int32 `[B]`, tokens to attend to, the new one included, at most N · S.
            0 gives a row of zeros (a padding row of a captured graph).
        new: the last token of each context, to be rotated and written first; q is then not rotated
            yet either. None: everything is in the cache.
        window: how many of the last tokens are seen, the new one included; None: all.
        scale: factor on q · k, usually D^-0.5.
        split_size: tokens one program walks before its partial result is merged with the others'.
            None picks 512. A row's bits depend on this number, on the window and on nothing else
            in the batch; a value ≥ N · S never splits, as a plain full-attention pass walks.
        backend: `auto`, `triton` or `torch`. The torch path reads the lengths on the host.

    Returns:
        `[B, H, D]` in q's dtype, accumulated in fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    q_BGRD = _grouped(q_BHD, k_cache, v_cache)
    _check(q_BGRD, k_cache, v_cache, block_table_BN, context_len_B)
    if new is not None:
        _check_new(q_BGRD, new)
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 token, the new one")
    inputs = (q_BGRD, k_cache, v_cache, block_table_BN, context_len_B, scale)
    if use_triton("decode_attention", q_BHD, backend):
        from . import kernel

        return kernel.decode_attention(*inputs, new=new, window=window, split_size=split_size)
    return reference.decode_attention(*inputs, new=new, window=window)


def _grouped(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """q as `[B, G, R, D]`."""
    if q.ndim not in (3, 4) or k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            "decode_attention wants q [B, H, D] and equal caches [blocks, S, G, D], got "
            f"{tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    groups = k_cache.shape[2]
    if q.shape[1] % groups or (q.ndim == 4 and q.shape[1] != groups):
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {groups} KV heads")
    return q if q.ndim == 4 else q.unflatten(1, (groups, -1))


def _check_new(q: Tensor, new: NewToken) -> None:
    wanted = (len(q), q.shape[1], q.shape[3])
    if new.k_BGD.shape != wanted or new.v_BGD.shape != wanted:
        raise ValueError(
            f"new keys and values must be {list(wanted)}, got {tuple(new.k_BGD.shape)} and "
            f"{tuple(new.v_BGD.shape)}"
        )
    if not q.dtype == new.k_BGD.dtype == new.v_BGD.dtype:
        raise ValueError(f"new keys ({new.k_BGD.dtype}) and values must have q's {q.dtype}")
    table = new.cos_sin_PR
    if table.ndim != 2 or table.shape[1] % 2 or not 0 < table.shape[1] <= wanted[2]:
        raise ValueError(f"the cos/sin table must be [P, R], R even, got {tuple(table.shape)}")


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, context: Tensor) -> None:
    batch, dim = len(q), q.shape[3]
    block_size, cache_dim = k_cache.shape[1], k_cache.shape[3]
    if dim != cache_dim or dim > MAX_HEAD_DIM or dim % 16:
        raise ValueError(
            f"head dimensions {dim} (q) and {cache_dim} (cache) must be equal, a multiple of 16 "
            f"and at most {MAX_HEAD_DIM}"
        )
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
