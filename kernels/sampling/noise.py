"""Counter-based noise: 32 bits per (stream, position, token id), the same in torch and Triton.

    mix(h):  h ^= h >> 16;  h *= 0x7feb352d;  h ^= h >> 15;  h *= 0x846ca68b;  h ^= h >> 16
    a    = mix(low32(stream)  ^ mix(low32(position) + K))       K = 0x9e3779b9
    b    = mix(high32(stream) ^ mix(a + K))
    bits = mix(a + id · (b | 1))

all modulo 2^32: SplitMix (Steele, Lea & Flood 2014), a sequence of odd stride b | 1 from a, through
`mix`, Wellons' bijective integer hash "lowbias32" (2018); K is the golden ratio. Being a bijection
of the id, the bits of one row never collide.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK_32 = 0xFFFFFFFF
GOLDEN_32 = 0x9E3779B9
GOLDEN_64 = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B


def stream_key(seed: int, request: int) -> int:
    """A request's noise stream: splitmix64 (Steele et al. 2014) of seed, then of request.

    Returns:
        A signed 64-bit integer that fits an int64 tensor.
    """
    key = _splitmix64(_splitmix64(seed) ^ request)
    return key - (1 << 64) if key >> 63 else key


def noise_bits(stream_T: Tensor, position_T: Tensor, ids_V: Tensor) -> Tensor:
    """Noise bits of every row and token id, int64 `[T, V]` in [0, 2^32)."""
    a_T = _mix((stream_T & MASK_32) ^ _mix((position_T + GOLDEN_32) & MASK_32))
    b_T = _mix((stream_T >> 32 & MASK_32) ^ _mix((a_T + GOLDEN_32) & MASK_32))
    return _mix((a_T[:, None] + ids_V[None, :] * (b_T | 1)[:, None]) & MASK_32)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32, from 32 random bits.

    −log(−log(1 − w)) with w = (bits + 1/2) / 2^32: the large values, which win, come from small w,
    where fp32 is fine-grained; from a uniform near 1 they would be quantised.
    """
    w = (bits.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_(max=1 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def _mix(h: Tensor) -> Tensor:
    h = h ^ (h >> 16)
    h = h.mul_(MIX_1).bitwise_and_(MASK_32)
    h = h.bitwise_xor_(h >> 15)
    h = h.mul_(MIX_2).bitwise_and_(MASK_32)
    return h.bitwise_xor_(h >> 16)


def _splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    z = (state + GOLDEN_64) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)
