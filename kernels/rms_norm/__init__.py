"""Root mean square norm fused with the residual addition before it (Zhang & Sennrich 2019).

    r = x + residual                          in x's dtype, as the plain layer adds it
    y = weight · (r / sqrt(mean(r²) + eps))   statistics in fp32, normed r rounded to x's dtype

The two roundings are those of Hugging Face's Llama (and of the norm a model trains with), so that
generation and training see the same activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import use_triton
from . import reference

__all__ = ["rms_norm"]

MAX_HIDDEN = 65536


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """RMSNorm of `x + residual`.

    Args:
        x: `[..., hidden]` bf16, fp16 or fp32.
        weight: `[hidden]`.
        eps: added to the mean square.
        residual: same shape and dtype as x; None: nothing is added.
        backend: `auto`, `triton` or `torch`. Where autograd records the call, torch runs: the
            Triton version has no backward.

    Returns:
        y in the wider of x's and weight's dtypes, and the new residual stream: `x + residual`, or
        x itself where residual is None.

    Raises:
        ValueError: shapes or dtypes that do not fit, or hidden above 65536.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not match hidden size {x.shape[-1]}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual {residual.dtype} {tuple(residual.shape)} is not x's {x.dtype} "
            f"{tuple(x.shape)}"
        )
    if x.shape[-1] > MAX_HIDDEN:
        raise ValueError(f"hidden size {x.shape[-1]} is above {MAX_HIDDEN}, one program's limit")
    inputs = (x, weight) if residual is None else (x, weight, residual)
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if not recorded and use_triton("rms_norm", x, backend):
        from . import kernel as path
    else:
        path = reference
    return path.rms_norm(x, weight, eps, residual)
