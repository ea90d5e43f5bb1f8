"""The maths of int8 reduction in plain torch: the definition every kernel must equal bit for bit.

Shape suffixes: R rows (one per peer), C columns (values of a row), K blocks of a row, N ranks
whose rows are summed, b values of a block.

For a block of values x (fp32; bf16 is widened first, which is exact):

    s = max|x| / 127        one IEEE division, fp32; at most MAX_SCALE, so that 127 * s is finite
    q = round(x / s)        IEEE division, half to even, int8 in [-127, 127]
    x̂ = q * s               so |x - x̂| <= s / 2 up to fp32 rounding, that is max|x| / 254

- With a residual (error feedback) x is value + residual, and the residual becomes x - x̂.
- With a seed, rounding is stochastic: q = floor(x / s + u), u uniform in [0, 1) from a hash of
  (seed, position), so |x - x̂| < s and the expectation of x̂ is x.
- A block of zeros has s = 0 and q = 0.
- A block with an inf or NaN has s = NaN and q = 0, so that it comes out as NaN everywhere: a
  broken gradient stays visibly broken. Its residual is left as it was.
- Below max|x| = 1.5e-36 the scale is subnormal and loses digits; the error is then < 1e-43.

Sums over ranks run in rank order, fp32, multiplication and addition rounded separately.
"""

import torch

from .message import MAX_SCALE

_HASH_STEP = 0x9E3779B1
_MASK32 = 0xFFFFFFFF


def _mix32(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser, on int64 tensors that hold unsigned 32-bit values."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _MASK32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _MASK32
    return h ^ (h >> 16)


def uniform_noise(rows: int, columns: int, seed: int, device: torch.device) -> torch.Tensor:
    """Counter-based noise in [0, 1), fp32 [rows, columns], 24 bits, the same on every device."""
    position = torch.arange(rows * columns, dtype=torch.int64, device=device)
    h = _mix32((position * _HASH_STEP + seed) & _MASK32)
    return ((h >> 8).to(torch.float32) * 2.0**-24).view(rows, columns)


def _blocked(x_RC: torch.Tensor, block: int) -> torch.Tensor:
    """fp32 copy [R, K, b], the short last block filled with zeros."""
    padding = -x_RC.shape[1] % block
    x_RC = torch.nn.functional.pad(x_RC.to(torch.float32), (0, padding))
    return x_RC.unflatten(1, (-1, block))


def _rounded(ratio_RKb: torch.Tensor, columns: int, seed: int | None) -> torch.Tensor:
    if seed is None:
        return ratio_RKb.round_().clamp_(-127, 127)
    rows, _, block = ratio_RKb.shape
    noise_RC = uniform_noise(rows, columns, seed, ratio_RKb.device)
    return ratio_RKb.add_(_blocked(noise_RC, block)).floor_().clamp_(-127, 127)


def quantize(
    x_RC: torch.Tensor,
    q_RC: torch.Tensor,
    scale_RK: torch.Tensor,
    block: int,
    residual_RC: torch.Tensor | None = None,
    seed: int | None = None,
) -> None:
    """Quantise rows of values, block by block.

    Args:
        x_RC: in, fp32 or bf16, last dim contiguous.
        q_RC: out, int8.
        scale_RK: out, fp32, K = ceil(C / block).
        block: values per scale.
        residual_RC: in and out, fp32 or bf16: added to the values, then set to what was lost.
        seed: 32-bit seed of stochastic rounding; None rounds half to even.
    """
    columns = x_RC.shape[1]
    value_RKb = _blocked(x_RC, block)
    if residual_RC is not None:
        value_RKb = value_RKb + _blocked(residual_RC, block)
    absmax_RK = value_RKb.abs().amax(dim=2)
    finite_RK = absmax_RK.isfinite()
    # By a tensor: torch divides by a Python number on a GPU as a multiplication, with other bits.
    divided_RK = absmax_RK / torch.full_like(absmax_RK, 127.0)
    scale_RK.copy_(torch.where(finite_RK, divided_RK.clamp_(max=MAX_SCALE), torch.nan))
    usable_RK1 = (scale_RK > 0).unsqueeze(2)
    ratio_RKb = torch.where(usable_RK1, value_RKb / scale_RK.unsqueeze(2), 0.0)
    rounded_RKb = torch.where(usable_RK1, _rounded(ratio_RKb, columns, seed), 0.0)
    q_RC.copy_(rounded_RKb.flatten(1)[:, :columns])
    if residual_RC is not None:
        lost_RKb = value_RKb - rounded_RKb * scale_RK.unsqueeze(2)
        kept_RKb = torch.where(finite_RK.unsqueeze(2), lost_RKb, _blocked(residual_RC, block))
        residual_RC.copy_(kept_RKb.flatten(1)[:, :columns])


def dequantize(
    q_RC: torch.Tensor, scale_RK: torch.Tensor, block: int, out_RC: torch.Tensor
) -> None:
    """Write ``q * scale`` into ``out_RC`` (fp32 or bf16, last dim contiguous)."""
    value_RKb = _blocked(q_RC, block) * scale_RK.unsqueeze(2)
    out_RC.copy_(value_RKb.flatten(1)[:, : q_RC.shape[1]])


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
    """Dequantise the rows of N ranks, sum them in rank order, multiply by ``factor``.

    The sum goes to ``out_C`` (fp32 or bf16), or is quantised again into ``q_C`` and ``scale_K``
    (with ``residual_C`` and ``seed`` as in `quantize`), or both.
    """
    sum_1C = torch.empty(1, q_NC.shape[1], dtype=torch.float32, device=q_NC.device)
    dequantize(q_NC[:1], scale_NK[:1], block, sum_1C)
    term_1C = torch.empty_like(sum_1C)
    for rank in range(1, q_NC.shape[0]):
        dequantize(q_NC[rank : rank + 1], scale_NK[rank : rank + 1], block, term_1C)
        sum_1C += term_1C
    sum_1C *= factor
    if out_C is not None:
        out_C.copy_(sum_1C[0])
    if q_C is not None:
        residual_1C = None if residual_C is None else residual_C.unsqueeze(0)
        quantize(sum_1C, q_C.unsqueeze(0), scale_K.unsqueeze(0), block, residual_1C, seed)
