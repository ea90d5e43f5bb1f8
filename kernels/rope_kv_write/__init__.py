"""Rotary embedding of queries and keys, fused with the write of keys and values to a paged cache.

Per token at position p, head vector x = [x1, x2] cut in halves of R/2 (Su et al. 2021, in the
half-split pairing of GPT-NeoX that Hugging Face's Llama uses):

    y = [x1·cos(p·f) − x2·sin(p·f),  x2·cos(p·f) + x1·sin(p·f)]

in fp32, rounded once. With a table narrower than the head (partial rotary), the remaining
dimensions pass through.

Shapes: T tokens, H query heads, G KV heads, D head dimension, R rotary width (R ≤ D), P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import use_triton
from . import reference

__all__ = ["rope_kv_write", "rope_table"]


def rope_table(inv_freq: Tensor, positions: int, attention_scaling: float = 1.0) -> Tensor:
    """The cosines and sines of every position, for `rope_kv_write`.

    Args:
        inv_freq: `[R/2]` inverse frequencies in radians per position.
        positions: P, one more than the highest position used.
        attention_scaling: factor on both (YaRN's; 1 for the other kinds).

    Returns:
        `[P, R]` fp32 on inv_freq's device: R/2 cosines, then R/2 sines.
    """
    position_P = torch.arange(positions, device=inv_freq.device, dtype=torch.float32)
    angle = position_P[:, None] * inv_freq.float()[None, :]
    return torch.cat((angle.cos(), angle.sin()), dim=-1) * attention_scaling


def rope_kv_write(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; store the rotated keys and the values in the cache.

    Args:
        q_THD, k_TGD, v_TGD: `[T, H, D]`, `[T, G, D]`, `[T, G, D]`, one dtype, last dimension
            contiguous (slices of a fused QKV output are fine). q may come as `[T, G, H/G, D]`, as
            it lies in an output fused by KV head.
        cos_sin_PR: fp32 `[P, R]` from `rope_table`.
        positions_T: int64 `[T]`, each below P (not checked on a GPU).
        k_cache, v_cache: `[blocks, S, G, D]`, written in place in their own dtype; last dimension
            contiguous, other strides free.
        slots_T: int64 `[T]`: block · S + offset, no two equal; −1 writes nothing.
        backend: `auto`, `triton` or `torch`. The torch path reads which slots are −1 on the host.

    Returns:
        The rotated `[T, H, D]` and `[T, G, D]`, new contiguous tensors.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    _check(q_THD, k_TGD, v_TGD, cos_sin_PR, positions_T, k_cache, v_cache, slots_T)
    if use_triton("rope_kv_write", q_THD, backend):
        from . import kernel as path
    else:
        path = reference
    return path.rope_kv_write(
        q_THD, k_TGD, v_TGD, cos_sin_PR, positions_T, k_cache, v_cache, slots_T
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Tensor,
    k_cache: Tensor, v_cache: Tensor, slots: Tensor,
) -> None:  # fmt: skip
    grouped = q.ndim == 4 and k.ndim == 3 and q.shape[1] == k.shape[1]
    fits = k.ndim == 3 and (len(q), q.shape[-1]) == (len(k), k.shape[-1])
    if not (q.ndim == 3 or grouped) or not fits or k.shape != v.shape:
        raise ValueError(
            "rope_kv_write wants q [T, H, D] (or [T, G, H/G, D]) and equal k, v [T, G, D], got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    tokens, groups, dim = k.shape
    if not grouped and q.shape[1] % groups:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {groups} KV heads")
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        raise ValueError(
            f"the caches must both be [blocks, S, {groups}, {dim}], got {tuple(k_cache.shape)} "
            f"and {tuple(v_cache.shape)}"
        )
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"caches of two dtypes: keys {k_cache.dtype}, values {v_cache.dtype}")
    width = table.shape[-1]
    if table.ndim != 2 or table.dtype != torch.float32 or width % 2 or not 0 < width <= dim:
        raise ValueError(
            f"the cos/sin table must be fp32 [P, R] with R even and at most {dim}, got "
            f"{table.dtype} {tuple(table.shape)}"
        )
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(
            f"{tokens} tokens need as many positions and slots, got {tuple(positions.shape)} and "
            f"{tuple(slots.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if len({x.device for x in (q, k, v, table, positions, k_cache, v_cache, slots)}) > 1:
        raise ValueError("all tensors of rope_kv_write must be on one device")
    if any(x.stride(-1) != 1 for x in (q, k, v, table, k_cache, v_cache)):
        raise ValueError("the last dimension of q, k, v, the table and the caches: contiguous")
