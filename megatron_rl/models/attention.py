"""Core attention over a flat stream of tokens: packed training, prefill and decode in one place.

RoPE is applied here, at explicit positions, because Megatron's own rotary tensor is laid out per
sequence position and does not fit a decode batch of different lengths. What a forward pass needs
beside the tokens travels in one `AttentionBatch`, handed through Megatron's `packed_seq_params`
argument: it reaches every layer explicitly, also when activations are recomputed in the backward.

Shapes: T tokens of the flat stream, B sequences, H query heads, G KV heads (of this TP rank),
D head dimension, L longest sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.kernels.decode_attention import NewToken, decode_attention
from megatron_rl.kernels.rope_kv_write import rope_kv_write
from megatron_rl.models.architecture import Rope


@dataclass(kw_only=True)
class PagedCache:
    """Where a generation step reads and writes keys and values.

    Attributes:
        keys, values: per layer `[blocks, block_size, G, D]`, indexed by the local layer number.
        slots_T: int64 `[T]`, where token t's key goes: block · block_size + offset; -1, for no
            sequence's token, is the very last slot, which is never read. None where our decode
            kernel finds the place itself.
        block_table_BN: int32 `[B, N]`, the blocks of each sequence in order; what lies past its
            context may be anything.
        context_B: int32 `[B]`, tokens of each sequence after this step's writes.
        max_context: upper bound of `context_B`, known on the host.
        fresh: every sequence's context is what this step writes: nothing has to be read.
        rope_PR: cosines and sines for our kernels (see kernels/rope_kv_write). None: plain torch.
        decode: each sequence has one new token, and the kernels run.
        routes: per layer int16 `[slots, K]`, where the experts of each token are kept; None: they
            are not.
    """

    keys: list[Tensor]
    values: list[Tensor]
    block_table_BN: Tensor
    context_B: Tensor
    max_context: int
    slots_T: Tensor | None = None
    fresh: bool = False
    rope_PR: Tensor | None = None
    decode: bool = False
    routes: list[Tensor] | None = None


@dataclass(kw_only=True)
class AttentionBatch(PackedSeqParams):
    """One forward pass over a flat token stream.

    Attributes:
        positions_T: int64 `[T]`, position of each token in its own sequence, from 0.
        cu_seqlens_B1: int32 `[B+1]`, where each sequence's tokens start; the last entry may be
            smaller than T: the rest is padding, which attends to nothing and is never read.
        lengths: the same lengths on the host (avoids a device sync).
        rows_N: int64 `[N]`, stream positions that the head computes; None: all T.
        hidden_only: the last stage returns the rows' final hidden states `[N, E]` and not what
            its head makes of them.
        cache: paged KV cache for generation; None in training.
        routes_LTK: int16, the experts that token t takes in layer l, -1 where the router decides
            (see models/experts.py); None: it always does.
    """

    qkv_format: str = "thd"
    positions_T: Tensor | None = None
    cu_seqlens_B1: Tensor | None = None
    lengths: list[int] = field(default_factory=list)
    rows_N: Tensor | None = None
    hidden_only: bool = False
    cache: PagedCache | None = None
    routes_LTK: Tensor | None = None
    _rotary: tuple[Tensor, Tensor] | None = None
    _padding: tuple[Tensor, Tensor] | None = None
    _context: tuple[Tensor, Tensor] | None = None

    def rotary(self, inv_freq_D: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, 1, D]` in fp32, computed once per batch and shared by all layers."""
        if self._rotary is None:
            angles_TD = self.positions_T.float()[:, None] * inv_freq_D[None, :]
            angles_TD = torch.cat((angles_TD, angles_TD), dim=-1)[:, None, :]
            self._rotary = angles_TD.cos(), angles_TD.sin()
        return self._rotary

    def padding(self) -> tuple[Tensor, Tensor]:
        """Index pair between the stream and a right-padded `[B, L]` grid (both int64).

        Returns:
            `gather_BL` (stream position of each cell, 0 for padding) and `scatter_T` (cell of each
            real token).
        """
        if self._padding is None:
            longest = max(self.lengths)
            device = self.positions_T.device
            starts_B = self.cu_seqlens_B1[:-1].long()
            lengths_B = self.cu_seqlens_B1.diff().long()
            offset_L = torch.arange(longest, device=device)
            real_BL = offset_L[None] < lengths_B[:, None]
            gather_BL = torch.where(real_BL, starts_B[:, None] + offset_L[None], 0)
            self._padding = gather_BL, real_BL.flatten().nonzero().squeeze(1)
        return self._padding

    def context_grid(self, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
        """What plain torch reads of the paged cache, computed once per batch for all layers.

        Query i of a sequence with n new tokens and c tokens of context sits at position c − n + i.

        Returns:
            Block numbers int64 `[B, N]`, and bool `[B, 1, L, K]`: which of their K tokens each new
            token attends to.
        """
        if self._context is None:
            cache, device = self.cache, self.positions_T.device
            blocks = -(-cache.max_context // block_size)
            table_BN = cache.block_table_BN[:, :blocks].clamp(min=0).long()
            first_B = cache.context_B - self.cu_seqlens_B1.diff()
            query_BL = first_B[:, None] + torch.arange(max(self.lengths), device=device)
            key_K = torch.arange(table_BN.shape[1] * block_size, device=device)
            mask_BLK = _visible(query_BL[:, :, None], key_K, window)
            self._context = table_BN, mask_BLK[:, None]
        return self._context


def inverse_frequencies(head_dim: int, rope: Rope) -> Tensor:
    """Rotary inverse frequencies `[D/2]`, fp32.

    Sources: Su et al. 2021 (default); linear position interpolation, Chen et al. 2023 (linear);
    Llama 3.1 model card (llama3: long wavelengths slowed by `factor`, a smooth ramp between).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inv_freq
        low = rope.original_max_positions / rope.low_freq_factor
        high = rope.original_max_positions / rope.high_freq_factor
        ramp = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        mixed = (1 - ramp) * inv_freq / rope.factor + ramp * inv_freq
        slowed = torch.where(wavelength > low, inv_freq / rope.factor, inv_freq)
        return torch.where((wavelength <= low) & (wavelength >= high), mixed, slowed)
    return inv_freq


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary embedding in fp32 (half-split pairs), returned in x's dtype."""
    x = x_THD.float()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos_T1D + turned * sin_T1D).to(x_THD.dtype)


def packed_causal_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, batch: AttentionBatch, scale: float,
    backend: str = "auto", window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention within each sequence of a packed stream, over the last `window` tokens.

    Args:
        backend: "torch" (a grid, or one sequence after the other), "varlen" (torch's packed kernel:
            CUDA and half precision), or "auto": varlen where it runs. No order of arithmetic of
            training's attention is decided anywhere else.

    Returns:
        `[T, H, D]`; rows past the last sequence (padding) are zero.
    """
    if backend == "auto":
        backend = "varlen" if q_THD.is_cuda and q_THD.dtype != torch.float32 else "torch"
    if backend == "varlen":
        return _packed_varlen(q_THD, k_TGD, v_TGD, batch, scale, window)
    longest, real = max(batch.lengths), sum(batch.lengths)
    if q_THD.is_cuda or longest * len(batch.lengths) <= 2 * real + 64:
        return _packed_as_grid(q_THD, k_TGD, v_TGD, batch, scale, window)
    out = q_THD.new_zeros(q_THD.shape)
    pieces, start = [], 0
    for length in batch.lengths:
        q, k, v = (x[start : start + length, None] for x in (q_THD, k_TGD, v_TGD))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        pieces.append(_dense_causal(q, k, v, scale, window))
        start += length
    flat = torch.cat([p.squeeze(0) for p in pieces])
    return torch.cat((flat, out[start:])) if start < len(out) else flat


def _packed_as_grid(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, batch: AttentionBatch, scale: float,
    window: int | None,
) -> Tensor:  # fmt: skip
    """One dense call for sequences of similar length: right padding can't reach a real token
    through a causal mask."""
    gather_BL, scatter_T = batch.padding()
    q, k, v = (x[gather_BL] for x in (q_THD, k_TGD, v_TGD))
    out_XHD = _dense_causal(q, k, v, scale, window).flatten(0, 1)[scatter_T]
    missing = len(q_THD) - len(out_XHD)
    return F.pad(out_XHD, (0, 0, 0, 0, 0, missing)) if missing else out_XHD


def _dense_causal(
    q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, scale: float, window: int | None
) -> Tensor:
    repeat = q_BLHD.shape[2] // k_BLGD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLGD, v_BLGD))
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    position_L = torch.arange(q.shape[2], device=q.device)
    if window is None or len(position_L) <= window:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask_LL = _visible(position_L[:, None], position_L[None], window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_LL, scale=scale)
    return out.transpose(1, 2)


def _visible(query_pos: Tensor, key_pos: Tensor, window: int | None) -> Tensor:
    """Whether a key is one of the last `window` tokens up to the query."""
    causal = key_pos <= query_pos
    return causal if window is None else causal & (key_pos > query_pos - window)


def _packed_varlen(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, batch: AttentionBatch, scale: float,
    window: int | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    real, longest = sum(batch.lengths), max(batch.lengths)
    back = -1 if window is None else window - 1
    out = varlen_attn(
        q_THD[:real], k_TGD[:real], v_TGD[:real], batch.cu_seqlens_B1, batch.cu_seqlens_B1,
        longest, longest, scale=scale, window_size=(back, 0), **_grouped_heads(varlen_attn),
    )  # fmt: skip
    return F.pad(out, (0, 0, 0, 0, 0, len(q_THD) - real)) if real < len(q_THD) else out


@functools.cache
def _grouped_heads(varlen_attn: Callable) -> dict[str, bool]:
    """torch 2.11 takes fewer KV heads as they are; later versions want to be told."""
    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def paged_attention(
    q_THD: Tensor, batch: AttentionBatch, key_cache: Tensor, value_cache: Tensor, scale: float,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of new tokens over the paged cache, any mix of prefill chunks and decode rows.

    The plain path: gathers each sequence's blocks into a grid.

    Returns:
        `[T, H, D]`; padding rows are zero.
    """
    table_BN, mask_B1LK = batch.context_grid(key_cache.shape[1], window)
    blocks_M = table_BN.flatten()
    k, v = (
        x.index_select(0, blocks_M).view(len(table_BN), -1, *x.shape[2:]).transpose(1, 2)
        for x in (key_cache, value_cache)
    )
    one_each = len(batch.lengths) == len(q_THD)  # then the stream is the grid
    gather_BL, scatter_T = (None, None) if one_each else batch.padding()
    q_BHLD = (q_THD[:, None] if one_each else q_THD[gather_BL]).transpose(1, 2)
    on_cpu = not q_THD.is_cuda  # there torch's fused attention takes fewer KV heads as they are
    if not on_cpu:
        repeat = q_BHLD.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    out = F.scaled_dot_product_attention(
        q_BHLD, k, v, attn_mask=mask_B1LK, scale=scale, enable_gqa=on_cpu
    )
    out_XHD = out.transpose(1, 2).flatten(0, 1)
    if one_each:
        return out_XHD
    out_XHD = out_XHD[scatter_T]
    missing = len(q_THD) - len(out_XHD)
    return F.pad(out_XHD, (0, 0, 0, 0, 0, missing)) if missing else out_XHD


def write_cache(cache: PagedCache, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
    """Stores this step's keys and values at their slots."""
    flat_k = cache.keys[layer].flatten(0, 1)
    flat_v = cache.values[layer].flatten(0, 1)
    n = len(cache.slots_T)
    flat_k[cache.slots_T] = k_TGD[:n].to(flat_k.dtype)
    flat_v[cache.slots_T] = v_TGD[:n].to(flat_v.dtype)


class CoreAttention(MegatronModule):
    """Rotary embedding, KV cache and attention; has no parameters.

    Takes `query [T, H, D]`, `key` and `value [T, G, D]` and an `AttentionBatch` as
    `packed_seq_params`; returns `[T, H·D]`. With our kernels `query` may be `[T, G, H/G, D]`.
    """

    def __init__(self, config, layer_number: int, softmax_scale: float | None = None, **_) -> None:
        super().__init__(config=config)
        self.cache_layer = 0  # this rank's layers are counted when all chunks are built
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.window = config.window
        inv_freq = inverse_frequencies(config.kv_channels, config.rope)
        self.register_buffer("inv_freq", inv_freq.to(torch.cuda.current_device()), persistent=False)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
        attn_mask_type=None, attention_bias=None, packed_seq_params: AttentionBatch,
    ) -> Tensor:  # fmt: skip
        batch, cache = packed_seq_params, packed_seq_params.cache
        if cache is not None and cache.decode:
            return self._decode(query, key, value, cache)
        if cache is not None and cache.rope_PR is not None:
            keys, values = cache.keys[self.cache_layer], cache.values[self.cache_layer]
            q_THD, k_TGD = rope_kv_write(
                query, key, value, cache.rope_PR, batch.positions_T, keys, values, cache.slots_T
            )
        else:
            cos, sin = batch.rotary(self.inv_freq)
            q_THD, k_TGD = rotate(query, cos, sin), rotate(key, cos, sin)
            if cache is not None:
                write_cache(cache, self.cache_layer, k_TGD, value)
        if cache is None or cache.fresh:
            out = packed_causal_attention(
                q_THD, k_TGD, value, batch, self.scale, self.config.packed_attention, self.window
            )
        else:
            out = paged_attention(
                q_THD, batch, cache.keys[self.cache_layer], cache.values[self.cache_layer],
                self.scale, self.window,
            )  # fmt: skip
        return out.flatten(1)

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, cache: PagedCache) -> Tensor:
        """One new token per sequence, by our kernels."""
        out = decode_attention(
            query, cache.keys[self.cache_layer], cache.values[self.cache_layer],
            cache.block_table_BN, cache.context_B, self.scale,
            new=NewToken(k_BGD=key, v_BGD=value, cos_sin_PR=cache.rope_PR), window=self.window,
        )  # fmt: skip
        return out.flatten(1)
