"""What the last pipeline stage computes from hidden states: vocabulary logits or one value.

Only the asked rows of the stream reach a head: prompts and padding cost nothing there.

Shapes: T tokens of the stream (T/tp of them on this rank under sequence parallel), N rows, E hidden
size, V vocabulary rows on this TP rank.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


def select_rows(
    hidden_T1E: Tensor, rows_N: Tensor | None, *, tp_group, sequence_parallel: bool, sharded: bool
) -> Tensor:
    """Rows of the full stream for a head.

    Args:
        hidden_T1E: final hidden states, this rank's slice of T under sequence parallel.
        rows_N: stream positions, or None for all.
        sharded: True when every TP rank's head computes a different part of the output, so that
            gradients of the hidden states must be summed over TP; False for a replicated head.

    Returns:
        `[N, E]`, equal on all TP ranks.
    """
    if sequence_parallel:
        hidden_T1E = gather_from_sequence_parallel_region(
            hidden_T1E, tensor_parallel_output_grad=sharded, group=tp_group
        )
    elif sharded:
        hidden_T1E = copy_to_tensor_model_parallel_region(hidden_T1E, group=tp_group)
    hidden_TE = hidden_T1E[:, 0]
    return hidden_TE if rows_N is None else hidden_TE.index_select(0, rows_N)


def vocabulary_logits(hidden_NE: Tensor, weight_VE: Tensor, *, fp32: bool = True) -> Tensor:
    """Logits `[N, V]` of this rank's vocabulary shard.

    Args:
        fp32: keep the sums of half precision products in fp32. Rounded to bf16, a logit of 10 is
            off by up to 0.03, which the log-probs of two paths that differ in the last bit show.
            False: in the weights' dtype, half the memory.
    """
    if fp32 and weight_VE.dtype in (torch.bfloat16, torch.float16):
        return _FullPrecisionLogits.apply(hidden_NE, weight_VE)
    return F.linear(hidden_NE, weight_VE)


class _FullPrecisionLogits(torch.autograd.Function):
    """hidden · weightᵀ of half precision factors with an fp32 result; the backward's products are
    those of an ordinary linear layer in half precision."""

    @staticmethod
    def forward(ctx, hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE)
        if hidden_NE.is_cuda and _products_keep_fp32():
            return torch.mm(hidden_NE, weight_VE.t(), out_dtype=torch.float32)
        return hidden_NE.float() @ weight_VE.float().t()

    @staticmethod
    def backward(ctx, grad_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_NE, weight_VE = ctx.saved_tensors
        grad_NV = grad_NV.to(weight_VE.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return (
            grad_NV @ weight_VE if needs_hidden else None,
            grad_NV.t() @ hidden_NE if needs_weight else None,
        )


@functools.cache
def _products_keep_fp32() -> bool:
    """Whether this torch multiplies half precision on the GPU into fp32 (`out_dtype`, 2.8)."""
    one = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    try:
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):
        return False


class ValueHead(torch.nn.Module):
    """A scalar per row: fp32 weights, fp32 output, replicated over TP.

    A fresh head is zero: the critic then predicts its bias everywhere, which the trainer sets to
    the mean reward of the first rollout.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=torch.float32, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))

    def forward(self, hidden_NE: Tensor) -> Tensor:
        """`[N, E]` → `[N]`."""
        return F.linear(hidden_NE.float(), self.weight, self.bias).squeeze(-1)
