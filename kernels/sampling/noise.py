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
    """Noise bits of every row and token id, uint32 `[T, V]`."""
    a_T = _mix(_low_word(stream_T) ^ _mix(_low_word(position_T + GOLDEN_32)))
    b_T = _mix(_low_word(stream_T >> 32) ^ _mix(a_T + _signed(GOLDEN_32)))
    bits_TV = ids_V.to(torch.int32) * (b_T | 1)[:, None]
    return _mix(bits_TV.add_(a_T[:, None])).view(torch.uint32)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32, from 32 random bits (uint32, or int64 below 2^32).

    −log(−log(1 − w)) with w = (bits + 1/2) / 2^32: the large values, which win, come from small w,
    where fp32 is fine-grained; from a uniform near 1 they would be quantised.
    """
    w = (bits.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_(max=1 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def _mix(h: Tensor) -> Tensor:
    """The hash of 32-bit words in an int32 tensor, which it overwrites.

    torch has no arithmetic on uint32; signed products and sums have the same bits, and at half the
    width of int64 the passes over a vocabulary are several times faster on a CPU.
    """
    spare = torch.empty_like(h)
    for shift, factor in ((16, MIX_1), (15, MIX_2)):
        h = _xor_shift(h, shift, spare).mul_(_signed(factor))
    return _xor_shift(h, 16, spare)


def _xor_shift(h: Tensor, shift: int, spare: Tensor) -> Tensor:
    """h ^= h >> shift, in place; the sign, which torch shifts in, is masked out."""
    torch.bitwise_right_shift(h, shift, out=spare)
    return h.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))


def _low_word(x: Tensor) -> Tensor:
    """The low 32 bits of int64 numbers, as int32."""
    return (x & MASK_32).to(torch.int32)


def _signed(word: int) -> int:
    """The int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


def _splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    z = (state + GOLDEN_64) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)
