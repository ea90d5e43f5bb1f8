"""What the last pipeline stage computes from hidden states: vocabulary logits or one value.

Only the asked rows of the stream reach a head: prompts and padding cost nothing there.

Shapes: T tokens of the stream (T/tp of them on this rank under sequence parallel), N rows, E hidden
size, V vocabulary rows on this TP rank.
"""

from __future__ import annotations

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


def vocabulary_logits(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
    """Logits `[N, V]` of this rank's vocabulary shard, in the weights' dtype."""
    return F.linear(hidden_NE, weight_VE)


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
