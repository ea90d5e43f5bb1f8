"""int8 quantise, reduce and dequantise in Triton, the default on GPUs.

Bit for bit the maths of `reference`: divisions have the bits of IEEE, fusing of multiply and add
is switched off at launch, and rounding adds 1.5 * 2^23, which rounds half to even. One program
takes ``TILE`` blocks of one row, so every byte is read and written once; the maximum is taken over
bit patterns, which order inf and NaN above every finite number. bf16 is rounded in integers because
Triton's interpreter, in which the tests run without a GPU, would truncate.

With 2-byte values the instructions, not the bytes, are the limit: an IEEE division is some 20 of
30 per value. A `Schedule` chooses between forms of equal bits.
"""

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .message import MAX_SCALE as _MAX_SCALE

MAX_SCALE = tl.constexpr(_MAX_SCALE)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23
_MAX_UNROLLED = tl.constexpr(16)  # more ranks than this are summed in a loop
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a kernel is cut and which instructions it uses; the bits do not depend on it.

    Attributes:
        tile_values: values of a program.
        warps: of a program; a thread has tile_values / (32 · warps) values.
        shared_reciprocal: one division per block instead of one per value, see `_divided`.
        bytes_as_floats: int8 become floats without conversion instructions, see `_widened`.
        streaming: values that are touched once are the first to leave the L2 cache.
    """

    tile_values: int = 2048
    warps: int = 4
    shared_reciprocal: bool = False
    bytes_as_floats: bool = False
    streaming: bool = False

    def options(self, block: int) -> dict:
        """Keyword arguments of a launch."""
        return {
            "BLOCK": block, "TILE": max(1, self.tile_values // block),
            "SHARED_RECIPROCAL": self.shared_reciprocal, "BYTES_AS_FLOATS": self.bytes_as_floats,
            "EVICT": "evict_first" if self.streaming else "", "num_warps": self.warps,
            "enable_fp_fusion": False,
        }  # fmt: skip


DEFAULT = Schedule()


@triton.jit
def _noise(position, seed):
    h = position.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return ((h ^ (h >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-8


@triton.jit
def _store(ptr, x, mask):
    """Store fp32 as the pointer's type, bf16 rounded half to even by hand."""
    if ptr.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16)
        tl.store(ptr, rounded.to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(ptr, x, mask=mask)


@triton.jit
def _scale_of(x_KB):
    """fp32 scale of each row (block) of a tile; NaN where a value is not finite."""
    bits_KB = x_KB.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top_K = tl.max(bits_KB, axis=1)
    scale_K = tl.div_rn(top_K.to(tl.float32, bitcast=True), 127.0)
    scale_K = tl.minimum(scale_K, MAX_SCALE)
    return tl.where(top_K >= 0x7F800000, float("nan"), scale_K)


@triton.jit
def _fma(a, b, c):
    """a * b + c, rounded once. The interpreter would round twice; in fp64 it rounds as rarely as
    matters: the sums here are exact or far from the middle between two floats."""
    if _INTERPRETED:
        return (a.to(tl.float64) * b + c).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def _divided(x_KB, scale_K, SHARED: tl.constexpr):
    """x / scale with the bits of IEEE division, for scales above zero.

    Shared: from the block's correctly rounded reciprocal. Its remainder in a second float makes the
    first quotient one of the two floats around x / scale, and then one correction by the exact
    remainder is rounded as the division is (Markstein 1990, theorem 7). Both sides are first
    multiplied by the power of two that brings the scale into [1, 2) (tiny ones below): no remainder
    is lost to underflow.
    """
    if not SHARED:
        return tl.div_rn(x_KB, scale_K[:, None] + tl.zeros_like(x_KB))
    exponent_K = scale_K.to(tl.int32, bitcast=True) & 0x7F800000
    power_K = (0x7F000000 - exponent_K).to(tl.float32, bitcast=True)
    scale_K *= power_K
    inverse_K = tl.div_rn(tl.full(scale_K.shape, 1.0, tl.float32), scale_K)
    rest_K = _fma(-scale_K, inverse_K, tl.full(scale_K.shape, 1.0, tl.float32)) * inverse_K
    inverse_K1 = inverse_K[:, None]
    x_KB *= power_K[:, None]
    near_KB = _fma(x_KB, inverse_K1, x_KB * rest_K[:, None])
    remainder_KB = _fma(near_KB, -scale_K[:, None], x_KB)
    return _fma(remainder_KB, inverse_K1, near_KB)


@triton.jit
def _widened(q_KB, AS_FLOATS: tl.constexpr):
    """int8 as fp32. As floats: b ^ 0x80 in the low bits of 2^23 is the float 2^23 + b + 128; a byte
    permutation makes each of a word of four."""
    if not AS_FLOATS:
        return q_KB.to(tl.float32)
    if _INTERPRETED:
        raised_KB = (q_KB.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32) | 0x4B000000
        return raised_KB.to(tl.float32, bitcast=True) - 8388736.0
    raised_KB = tl.inline_asm_elementwise(
        """{ .reg .b32 t;
        xor.b32 t, $4, 0x80808080;
        prmt.b32 $0, t, 0x4B000000, 0x7540;
        prmt.b32 $1, t, 0x4B000000, 0x7541;
        prmt.b32 $2, t, 0x4B000000, 0x7542;
        prmt.b32 $3, t, 0x4B000000, 0x7543; }""",
        "=r,=r,=r,=r,r", [q_KB], dtype=tl.float32, is_pure=True, pack=4,
    )  # fmt: skip
    return raised_KB - 8388736.0


@triton.jit
def _rounded(x_KB, scale_K, position_KB, seed, SHARED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Quantised values, fp32 plus ROUNDER: the low byte of the bits is the int8.

    Without a usable scale they are 0, whatever the quotients are: the limits are, and a NaN has a
    low byte of 0 in the interpreter, where it passes them.
    """
    usable_K = scale_K > 0.0
    ratio_KB = _divided(x_KB, tl.where(usable_K, scale_K, 1.0), SHARED)
    if STOCHASTIC:
        ratio_KB = tl.floor(ratio_KB + _noise(position_KB, seed))
    limit_K1 = tl.where(usable_K, 127.0, 0.0)[:, None]
    return tl.minimum(tl.maximum(ratio_KB, -limit_K1), limit_K1) + ROUNDER


@triton.jit
def _low_byte(biased_KB):
    """int8 out of what `_rounded` returns: cheaper than converting a float."""
    return biased_KB.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit(do_not_specialize=["seed"])
def _quantize_kernel(
    x_ptr, x_stride, q_ptr, q_stride, scale_ptr, scale_stride, residual_ptr, residual_stride,
    columns, seed,
    BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STOCHASTIC: tl.constexpr,
    SHARED_RECIPROCAL: tl.constexpr, BYTES_AS_FLOATS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    k_K = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at_KB = k_K[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside_KB = at_KB < columns
    x_at_KB = x_ptr + row * x_stride + at_KB
    x_KB = tl.load(x_at_KB, mask=inside_KB, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at_KB = residual_ptr + row * residual_stride + at_KB
        x_KB += tl.load(residual_at_KB, mask=inside_KB, other=0.0).to(tl.float32)
    scale_K = _scale_of(x_KB)
    position_KB = row * columns + at_KB
    biased_KB = _rounded(x_KB, scale_K, position_KB, seed, SHARED_RECIPROCAL, STOCHASTIC)
    q_at_KB = q_ptr + row * q_stride + at_KB
    tl.store(q_at_KB, _low_byte(biased_KB), mask=inside_KB, eviction_policy=EVICT)
    tl.store(scale_ptr + row * scale_stride + k_K, scale_K, mask=k_K * BLOCK < columns)
    if HAS_RESIDUAL:
        finite_K1 = (scale_K == scale_K)[:, None]
        lost_KB = x_KB - (biased_KB - ROUNDER) * scale_K[:, None]
        _store(residual_at_KB, lost_KB, inside_KB & finite_K1)


@triton.jit
def _values(q_at_KB, inside_KB, EVICT: tl.constexpr):
    return tl.load(q_at_KB, mask=inside_KB, other=0, eviction_policy=EVICT)


@triton.jit
def _dequantize_kernel(
    q_ptr, q_stride, scale_ptr, scale_stride, out_ptr, out_stride, columns,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SHARED_RECIPROCAL: tl.constexpr,
    BYTES_AS_FLOATS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    k_K = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at_KB = k_K[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside_KB = at_KB < columns
    scale_K = tl.load(scale_ptr + row * scale_stride + k_K, mask=k_K * BLOCK < columns, other=0.0)
    q_at_KB = q_ptr + row * q_stride + at_KB
    q_KB = _widened(_values(q_at_KB, inside_KB, EVICT), BYTES_AS_FLOATS)
    _store(out_ptr + row * out_stride + at_KB, q_KB * scale_K[:, None], inside_KB)


@triton.jit
def _term(
    q_at_KB, scale_at_K, inside_KB, inside_K, AS_FLOATS: tl.constexpr, EVICT: tl.constexpr
):  # fmt: skip
    """One rank's dequantised tile."""
    scale_K = tl.load(scale_at_K, mask=inside_K, other=0.0)
    return _widened(_values(q_at_KB, inside_KB, EVICT), AS_FLOATS) * scale_K[:, None]


@triton.jit(do_not_specialize=["seed"])
def _reduce_kernel(
    q_ptr, q_stride, scale_ptr, scale_stride, out_ptr, q_out_ptr, scale_out_ptr,
    residual_ptr, columns, factor, seed, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_OUT: tl.constexpr, REQUANTIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, STOCHASTIC: tl.constexpr, SHARED_RECIPROCAL: tl.constexpr,
    BYTES_AS_FLOATS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    k_K = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at_KB = k_K[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside_KB = at_KB < columns
    sum_KB = tl.zeros((TILE, BLOCK), tl.float32)
    inside_K = k_K * BLOCK < columns
    q_at_KB = q_ptr + at_KB
    scale_at_K = scale_ptr + k_K
    if RANKS <= _MAX_UNROLLED:
        # Unrolled, so that the loads of all ranks are in flight together.
        for _ in tl.static_range(RANKS):
            sum_KB += _term(q_at_KB, scale_at_K, inside_KB, inside_K, BYTES_AS_FLOATS, EVICT)
            q_at_KB += q_stride
            scale_at_K += scale_stride
    else:
        for _ in range(RANKS):
            sum_KB += _term(q_at_KB, scale_at_K, inside_KB, inside_K, BYTES_AS_FLOATS, EVICT)
            q_at_KB += q_stride
            scale_at_K += scale_stride
    sum_KB *= factor
    if HAS_OUT:
        _store(out_ptr + at_KB, sum_KB, inside_KB)
    if REQUANTIZE:
        if HAS_RESIDUAL:
            sum_KB += tl.load(residual_ptr + at_KB, mask=inside_KB, other=0.0).to(tl.float32)
        total_K = _scale_of(sum_KB)
        biased_KB = _rounded(sum_KB, total_K, at_KB, seed, SHARED_RECIPROCAL, STOCHASTIC)
        tl.store(q_out_ptr + at_KB, _low_byte(biased_KB), mask=inside_KB, eviction_policy=EVICT)
        tl.store(scale_out_ptr + k_K, total_K, mask=inside_K)
        if HAS_RESIDUAL:
            finite_K1 = (total_K == total_K)[:, None]
            lost_KB = sum_KB - (biased_KB - ROUNDER) * total_K[:, None]
            _store(residual_ptr + at_KB, lost_KB, inside_KB & finite_K1)


def _programs(columns: int, options: dict) -> int:
    """Programs per row."""
    return triton.cdiv(columns, options["TILE"] * options["BLOCK"])


def quantize(
    x_RC: torch.Tensor,
    q_RC: torch.Tensor,
    scale_RK: torch.Tensor,
    block: int,
    residual_RC: torch.Tensor | None = None,
    seed: int | None = None,
    schedule: Schedule = DEFAULT,
) -> None:
    """See `reference.quantize`."""
    rows, columns = x_RC.shape
    if rows == 0 or columns == 0:
        return
    options = schedule.options(block)
    residual_stride = 0 if residual_RC is None else residual_RC.stride(0)
    _quantize_kernel[(_programs(columns, options), rows)](
        x_RC, x_RC.stride(0), q_RC, q_RC.stride(0), scale_RK, scale_RK.stride(0),
        residual_RC, residual_stride, columns, seed or 0,
        HAS_RESIDUAL=residual_RC is not None, STOCHASTIC=seed is not None, **options,
    )  # fmt: skip


def dequantize(
    q_RC: torch.Tensor, scale_RK: torch.Tensor, block: int, out_RC: torch.Tensor,
    schedule: Schedule = DEFAULT,
) -> None:  # fmt: skip
    """See `reference.dequantize`."""
    rows, columns = q_RC.shape
    if rows == 0 or columns == 0:
        return
    options = schedule.options(block)
    _dequantize_kernel[(_programs(columns, options), rows)](
        q_RC, q_RC.stride(0), scale_RK, scale_RK.stride(0), out_RC, out_RC.stride(0), columns,
        **options,
    )  # fmt: skip


def reduce(
    q_NC: torch.Tensor,
    scale_NK: torch.Tensor,
    block: int,
    *,
    out_C: torch.Tensor | None = None,
    q_C: torch.Tensor | None = None,
    scale_K: torch.Tensor | None = None,
    residual_C: torch.Tensor | None = None,
    factor: float = 1.0,
    seed: int | None = None,
    schedule: Schedule = DEFAULT,
) -> None:
    """See `reference.reduce`."""
    ranks, columns = q_NC.shape
    if columns == 0:
        return
    options = schedule.options(block)
    _reduce_kernel[(_programs(columns, options),)](
        q_NC, q_NC.stride(0), scale_NK, scale_NK.stride(0), out_C, q_C, scale_K,
        residual_C, columns, factor, seed or 0, RANKS=ranks,
        HAS_OUT=out_C is not None, REQUANTIZE=q_C is not None,
        HAS_RESIDUAL=residual_C is not None, STOCHASTIC=seed is not None, **options,
    )  # fmt: skip
