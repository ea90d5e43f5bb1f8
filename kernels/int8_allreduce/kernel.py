"""int8 quantise, reduce and dequantise in Triton, for GPUs without the compiled CUDA kernels.

Bit for bit the maths of `reference`: divisions are IEEE (``tl.div_rn``), fusing of multiply and
add is switched off at launch, and rounding adds 1.5 * 2^23, which rounds half to even. One program
takes ``TILE`` blocks of one row, so every byte is read and written once; the maximum is taken over
bit patterns, which order inf and NaN above every finite number. bf16 is rounded in integers because
Triton's interpreter, in which the tests run without a GPU, would truncate.
"""

import torch
import triton
import triton.language as tl

from .message import MAX_SCALE as _MAX_SCALE

_TILE_VALUES = 2048
MAX_SCALE = tl.constexpr(_MAX_SCALE)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23
_MAX_UNROLLED = tl.constexpr(16)  # more ranks than this are summed in a loop


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
def _rounded(x_KB, scale_K, position_KB, seed, STOCHASTIC: tl.constexpr):
    """Quantised values, fp32 plus ROUNDER: the low byte of the bits is the int8."""
    usable_K1 = (scale_K > 0.0)[:, None]
    safe_K = tl.where(scale_K > 0.0, scale_K, 1.0)
    ratio_KB = tl.div_rn(tl.where(usable_K1, x_KB, 0.0), safe_K[:, None] + tl.zeros_like(x_KB))
    if STOCHASTIC:
        ratio_KB = tl.floor(ratio_KB + _noise(position_KB, seed))
    ratio_KB = tl.minimum(tl.maximum(ratio_KB, -127.0), 127.0)
    return ratio_KB + ROUNDER


@triton.jit
def _low_byte(biased_KB):
    """int8 out of what `_rounded` returns: cheaper than converting a float."""
    return biased_KB.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit(do_not_specialize=["seed"])
def _quantize_kernel(
    x_ptr, x_stride, q_ptr, q_stride, scale_ptr, scale_stride, residual_ptr, residual_stride,
    columns, seed,
    BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    k_K = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at_KB = k_K[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside_KB = at_KB < columns
    x_KB = tl.load(x_ptr + row * x_stride + at_KB, mask=inside_KB, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at_KB = residual_ptr + row * residual_stride + at_KB
        x_KB += tl.load(residual_at_KB, mask=inside_KB, other=0.0).to(tl.float32)
    scale_K = _scale_of(x_KB)
    biased_KB = _rounded(x_KB, scale_K, row * columns + at_KB, seed, STOCHASTIC)
    tl.store(q_ptr + row * q_stride + at_KB, _low_byte(biased_KB), mask=inside_KB)
    tl.store(scale_ptr + row * scale_stride + k_K, scale_K, mask=k_K * BLOCK < columns)
    if HAS_RESIDUAL:
        finite_K1 = (scale_K == scale_K)[:, None]
        lost_KB = x_KB - (biased_KB - ROUNDER) * scale_K[:, None]
        _store(residual_at_KB, lost_KB, inside_KB & finite_K1)


@triton.jit
def _dequantize_kernel(
    q_ptr, q_stride, scale_ptr, scale_stride, out_ptr, out_stride, columns,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    k_K = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at_KB = k_K[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside_KB = at_KB < columns
    scale_K = tl.load(scale_ptr + row * scale_stride + k_K, mask=k_K * BLOCK < columns, other=0.0)
    q_KB = tl.load(q_ptr + row * q_stride + at_KB, mask=inside_KB, other=0).to(tl.float32)
    _store(out_ptr + row * out_stride + at_KB, q_KB * scale_K[:, None], inside_KB)


@triton.jit
def _term(q_at_KB, scale_at_K, inside_KB, inside_K):
    """One rank's dequantised tile."""
    scale_K = tl.load(scale_at_K, mask=inside_K, other=0.0)
    return tl.load(q_at_KB, mask=inside_KB, other=0).to(tl.float32) * scale_K[:, None]


@triton.jit(do_not_specialize=["seed"])
def _reduce_kernel(
    q_ptr, q_stride, scale_ptr, scale_stride, out_ptr, q_out_ptr, scale_out_ptr,
    residual_ptr, columns, factor, seed, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_OUT: tl.constexpr, REQUANTIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, STOCHASTIC: tl.constexpr,
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
            sum_KB += _term(q_at_KB, scale_at_K, inside_KB, inside_K)
            q_at_KB += q_stride
            scale_at_K += scale_stride
    else:
        for _ in range(RANKS):
            sum_KB += _term(q_at_KB, scale_at_K, inside_KB, inside_K)
            q_at_KB += q_stride
            scale_at_K += scale_stride
    sum_KB *= factor
    if HAS_OUT:
        _store(out_ptr + at_KB, sum_KB, inside_KB)
    if REQUANTIZE:
        if HAS_RESIDUAL:
            sum_KB += tl.load(residual_ptr + at_KB, mask=inside_KB, other=0.0).to(tl.float32)
        total_K = _scale_of(sum_KB)
        biased_KB = _rounded(sum_KB, total_K, at_KB, seed, STOCHASTIC)
        tl.store(q_out_ptr + at_KB, _low_byte(biased_KB), mask=inside_KB)
        tl.store(scale_out_ptr + k_K, total_K, mask=inside_K)
        if HAS_RESIDUAL:
            finite_K1 = (total_K == total_K)[:, None]
            lost_KB = sum_KB - (biased_KB - ROUNDER) * total_K[:, None]
            _store(residual_ptr + at_KB, lost_KB, inside_KB & finite_K1)


def _tiling(columns: int, block: int) -> tuple[int, dict]:
    """Programs per row and the launch options that go with them."""
    tile = _TILE_VALUES // block
    options = {"BLOCK": block, "TILE": tile, "num_warps": 4, "enable_fp_fusion": False}
    return triton.cdiv(columns, tile * block), options


def quantize(
    x_RC: torch.Tensor,
    q_RC: torch.Tensor,
    scale_RK: torch.Tensor,
    block: int,
    residual_RC: torch.Tensor | None = None,
    seed: int | None = None,
) -> None:
    """See `reference.quantize`."""
    rows, columns = x_RC.shape
    if rows == 0 or columns == 0:
        return
    programs, options = _tiling(columns, block)
    residual_stride = 0 if residual_RC is None else residual_RC.stride(0)
    _quantize_kernel[(programs, rows)](
        x_RC, x_RC.stride(0), q_RC, q_RC.stride(0), scale_RK, scale_RK.stride(0),
        residual_RC, residual_stride, columns, seed or 0,
        HAS_RESIDUAL=residual_RC is not None, STOCHASTIC=seed is not None, **options,
    )  # fmt: skip


def dequantize(
    q_RC: torch.Tensor, scale_RK: torch.Tensor, block: int, out_RC: torch.Tensor
) -> None:
    """See `reference.dequantize`."""
    rows, columns = q_RC.shape
    if rows == 0 or columns == 0:
        return
    programs, options = _tiling(columns, block)
    _dequantize_kernel[(programs, rows)](
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
) -> None:
    """See `reference.reduce`."""
    ranks, columns = q_NC.shape
    if columns == 0:
        return
    programs, options = _tiling(columns, block)
    _reduce_kernel[(programs,)](
        q_NC, q_NC.stride(0), scale_NK, scale_NK.stride(0), out_C, q_C, scale_K,
        residual_C, columns, factor, seed or 0, RANKS=ranks,
        HAS_OUT=out_C is not None, REQUANTIZE=q_C is not None,
        HAS_RESIDUAL=residual_C is not None, STOCHASTIC=seed is not None, **options,
    )  # fmt: skip
