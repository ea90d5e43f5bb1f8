"""Linear layer of a few rows, with the norm before it and the SwiGLU after it in one kernel.

    r = x + residual                                in x's dtype
    h = norm_weight · (r / sqrt(mean(r²) + eps))    as megatron_rl.kernels.rms_norm; else h = x
    y = h · weightᵀ + bias                          sums in fp32, rounded once
    y = silu(y[:F]) · y[F:]                         as megatron_rl.kernels.swiglu, where gated

Decoding one sequence reads every weight for one row: the time is that of the memory, and each
launch besides is lost. A matrix library's tiles are made for more rows.

Shapes: B rows, K inputs, N weight rows, F = N / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backend import use_triton
from . import reference

__all__ = ["MAX_ROWS", "Norm", "thin_linear"]

# The weights stay in registers for all rows of the input; above, a matrix product is faster.
MAX_ROWS = 4
MAX_INPUTS = 32768


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """An RMSNorm before the layer.

    Attributes:
        weight_K: its weight.
        eps: added to the mean square.
        residual_BK: added to the input before it; None: nothing is.
    """

    weight_K: Tensor
    eps: float
    residual_BK: Tensor | None = None


def thin_linear(
    x_BK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`x · weightᵀ` for at most `MAX_ROWS` rows; has no backward.

    Args:
        x_BK: `[B, K]` bf16, fp16 or fp32, K at most 32768.
        weight_NK: `[N, K]` in x's dtype, rows contiguous.
        bias_N: `[N]`.
        norm: RMSNorm of the input, with the residual addition before it.
        gated: the rows of weight are F gates, then F factors.
        backend: `auto`, `triton` or `torch`.

    Returns:
        y `[B, N]` (`[B, F]` where gated) in x's dtype, and the new residual stream `[B, K]`:
        `x + residual`, or x itself where there is none.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x_BK, weight_NK, bias_N, norm, gated)
    if use_triton("thin_linear", x_BK, backend):
        from . import kernel as path
    else:
        path = reference
    return path.thin_linear(x_BK, weight_NK, bias_N, norm, gated)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, gated: bool) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"thin_linear wants x [B, K] and weight [N, K], got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if len(x) > MAX_ROWS or x.shape[1] > MAX_INPUTS:
        raise ValueError(
            f"x {tuple(x.shape)} is too large: at most {MAX_ROWS} rows of {MAX_INPUTS} inputs"
        )
    if x.dtype != weight.dtype or weight.stride(1) != 1:
        raise ValueError(f"weight {weight.dtype} must have x's dtype {x.dtype} and dense rows")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit {len(weight)} weight rows")
    if gated and len(weight) % 2:
        raise ValueError(f"gates and as many factors, got {len(weight)} weight rows")
    if norm is not None and norm.weight_K.shape != x.shape[1:]:
        raise ValueError(f"norm weight {tuple(norm.weight_K.shape)} does not fit {x.shape[1]}")
    residual = None if norm is None else norm.residual_BK
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual {residual.dtype} {tuple(residual.shape)} is not x's {x.dtype} "
            f"{tuple(x.shape)}"
        )
