"""Mixture of experts: Megatron's router over experts that share a tensor parallel group.

A tensor parallel group of tp ranks holds every expert of a layer once: `ep` parts of whole experts,
each cut into tp/ep slices of the feed-forward size. A token therefore never leaves its replica, so
that replicas generate independently of one another, and gradients of experts are reduced like all
others. Each rank computes its experts for all tokens of the replica; what the ranks add up is
reduced as in any tensor parallel layer.

Generation and training share `choose` and `expert_outputs`, and training can replay the experts
that generation took (`AttentionBatch.routes_LTK`).

Shapes: T tokens, E hidden size, X experts, K experts per token, S experts of this rank, F its slice
of the feed-forward size, P = T·K pairs of a token and an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_rl.kernels.swiglu import swiglu
from megatron_rl.models.architecture import Experts
from megatron_rl.models.attention import AttentionBatch

FREE = -1
"""In routes: the router decides."""


def choose(logits_TX: Tensor, experts: Experts, routes_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    Softmax over all experts, then the largest K (Mixtral, Jiang et al. 2024; Qwen3-MoE).

    Args:
        logits_TX: fp32.
        routes_TK: experts to take instead, FREE where the router decides; None: it always does.

    Returns:
        Weights fp32 `[T, K]` and experts int64 `[T, K]`.
    """
    probs_TX = logits_TX.softmax(-1)
    experts_TK = probs_TX.detach().topk(experts.per_token, dim=-1).indices
    if routes_TK is not None:
        experts_TK = torch.where(routes_TK == FREE, experts_TK, routes_TK.long())
    weights_TK = probs_TX.gather(1, experts_TK)
    if experts.normalised:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK, experts_TK


def expert_outputs(
    x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_S2FE: Tensor, down_SFE: Tensor,
    *, first: int, fixed_size: bool = False,
) -> Tensor:  # fmt: skip
    """Σ over a token's experts on this rank of weight · expert(token), `[T, E]`.

    Args:
        gate_up_S2FE: `[S, 2·F, E]`, gate above up; down_SFE: the second matrix, transposed.
        first: number of this rank's first expert.
        fixed_size: no size depends on a value, as a CUDA graph needs it.
    """
    own = len(gate_up_S2FE)
    if fixed_size and x_TE.is_cuda and x_TE.dtype != torch.bfloat16:  # grouped products need bf16
        return _every_expert(x_TE, weights_TK, experts_TK - first, gate_up_S2FE, down_SFE)
    expert_P = (experts_TK - first).flatten()
    expert_P = torch.where((expert_P >= 0) & (expert_P < own), expert_P, own)
    sorted_P, order_P = expert_P.sort(stable=True)
    ends_S = torch.searchsorted(
        sorted_P, torch.arange(own, device=sorted_P.device), right=True, out_int32=True
    )
    found = len(order_P) if fixed_size else int(ends_S[-1])  # other ranks' experts come last
    order_N = order_P[: max(found, 1)]  # one row at least, or autograd would not reach x
    rows_NE = x_TE[order_N // experts_TK.shape[1]]
    # The library writes neither outputs nor gradients of rows past the last group.
    real_N1 = torch.arange(len(order_N), device=x_TE.device)[:, None] < ends_S[-1]
    some_unreal = fixed_size or found == 0
    if some_unreal:
        rows_NE = torch.where(real_N1, rows_NE, 0)
    hidden_N2F = F.grouped_mm(rows_NE, gate_up_S2FE.transpose(1, 2), offs=ends_S)
    if torch.is_grad_enabled():
        gate_NF, up_NF = hidden_N2F.chunk(2, dim=-1)
        active_NF = F.silu(gate_NF) * up_NF
    else:
        active_NF = swiglu(hidden_N2F)
    out_NE = F.grouped_mm(active_NF, down_SFE, offs=ends_S)
    if some_unreal:
        out_NE = torch.where(real_N1, out_NE, 0)
    out_PE = out_NE.new_zeros((len(order_P), out_NE.shape[1])).index_copy(0, order_N, out_NE)
    weights_T1K = weights_TK[:, None].to(out_PE.dtype)
    return torch.bmm(weights_T1K, out_PE.view(*experts_TK.shape, -1))[:, 0]


def _every_expert(
    x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_S2FE: Tensor, down_SFE: Tensor
) -> Tensor:
    """All experts for all tokens: fixed sizes where the library has no grouped products."""
    out_TE = torch.zeros_like(x_TE)
    for index, (gate_up, down) in enumerate(zip(gate_up_S2FE, down_SFE, strict=True)):
        weight_T = torch.where(experts_TK == index, weights_TK, 0).sum(-1)
        out_TE += swiglu(x_TE @ gate_up.t()) @ down * weight_T[:, None].to(x_TE.dtype)
    return out_TE


class ExpertWeights(torch.nn.Module):
    """The matrices of this rank's experts, two parameters in all.

    `gate_up [S·2·F, E]` and `down [S·F, E]` (transposed), each expert's rows below the one before.
    """

    def __init__(self, config, experts: int) -> None:
        super().__init__()
        self.count = experts
        rows = experts * config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        for name, factor in (("gate_up", 2), ("down", 1)):
            parameter = torch.nn.Parameter(
                torch.empty(
                    (factor * rows, config.hidden_size), dtype=config.params_dtype,
                    device=torch.cuda.current_device(),
                )
            )  # fmt: skip
            # What Megatron asks of a parameter that tensor parallel ranks share.
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = 0, 1
            self.register_parameter(name, parameter)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """`[S, 2·F, E]` and `[S, F, E]`: views."""
        return self.gate_up.unflatten(0, (self.count, -1)), self.down.unflatten(0, (self.count, -1))


class ExpertRouter(TopKRouter):
    """Megatron's router with fp32 logits; its weight lies on the model's device from the start."""

    def __init__(self, config, pg_collection=None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.weight.data = self.weight.data.to(torch.cuda.current_device())

    def forward(self, x: Tensor, routes_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and experts of `x` `[…, E]`; see `choose`."""
        # Not `gating`: without Transformer Engine it fails in Megatron-Core 0.16.
        logits_TX = F.linear(x.flatten(0, -2).float(), self.weight.float())
        return choose(logits_TX, self.config.experts, routes_TK)


class ExpertLayer(BaseMoELayer):
    """The feed-forward part of a layer with experts.

    Attributes:
        batch: of the forward pass under way; the transformer layer sets it.
    """

    def __init__(self, config, pg_collection=None, layer_number: int | None = None) -> None:
        super().__init__(config, layer_number=layer_number, pg_collection=pg_collection)
        device = torch.cuda.current_device()
        self.router = ExpertRouter(config, pg_collection)
        self.experts = ExpertWeights(config, self.num_local_experts)
        self.batch: AttentionBatch | None = None
        counts = torch.zeros(config.num_moe_experts + 2, dtype=torch.int64, device=device)
        self.register_buffer("_counts", counts, persistent=False)

    def forward(self, hidden_states: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """`[T, 1, E]`, this rank's slice of the tokens under sequence parallelism."""
        group = self.attn_tp_group
        routes_TK = self._routes(len(hidden_states))
        weights_TK, experts_TK = self.router(hidden_states, routes_TK)
        if torch.is_grad_enabled():
            self._count(hidden_states, experts_TK, routes_TK)
        x = hidden_states
        if group.size() > 1:
            assert self.config.sequence_parallel, "experts with tp > 1 need sequence parallelism"
            x = gather_from_sequence_parallel_region(x, group=group)
            weights_TK = gather_from_sequence_parallel_region(weights_TK, group=group)
            experts_TK = gather_from_sequence_parallel_region(experts_TK, group=group)
        out = self.partial_outputs(x.flatten(0, 1), weights_TK, experts_TK).view_as(x)
        if group.size() > 1:
            out = reduce_scatter_to_sequence_parallel_region(out, group=group)
        return out, None

    def partial_outputs(
        self, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, fixed_size: bool = False
    ) -> Tensor:
        """What this rank adds to the outputs of these tokens: to be summed over the TP group."""
        gate_up, down = self.experts.matrices()
        return expert_outputs(
            x_TE, weights_TK, experts_TK, gate_up, down, first=self.local_expert_indices[0],
            fixed_size=fixed_size,
        )  # fmt: skip

    def _own_tokens(self, count: int) -> slice:
        """The stream positions of this rank's slice."""
        rank = self.attn_tp_group.rank() if self.config.sequence_parallel else 0
        return slice(rank * count, (rank + 1) * count)

    def _routes(self, count: int) -> Tensor | None:
        if self.batch is None or self.batch.routes_LTK is None:
            return None
        return self.batch.routes_LTK[self.layer_number - 1, self._own_tokens(count)]

    @torch.no_grad()
    def _count(self, x: Tensor, experts_TK: Tensor, routes_TK: Tensor | None) -> None:
        """Adds the real tokens of this pass to the counts."""
        own, experts = self._own_tokens(len(x)), self.config.experts
        position_T = torch.arange(own.start, own.stop, device=x.device)
        real_T1 = (position_T < self.batch.cu_seqlens_B1[-1])[:, None]
        self._counts[: experts.count].index_add_(
            0, experts_TK.flatten(), real_T1.expand_as(experts_TK).flatten().long()
        )
        if routes_TK is not None:
            _, chosen_TK = self.router(x)
            replayed_TK = (routes_TK != FREE) & real_T1
            same_TK = (routes_TK[:, :, None] == chosen_TK[:, None]).any(-1) & replayed_TK
            self._counts[experts.count :] += torch.stack((replayed_TK.sum(), same_TK.sum()))

    def take_counts(self) -> Tensor:
        """int64 `[X + 2]`: tokens of each expert in training since the last call, pairs that were
        replayed, and those of them that the router would have chosen."""
        counts = self._counts.clone()
        self._counts.zero_()
        return counts


class ExpertTransformerLayer(TransformerLayer):
    """Megatron's layer with experts, whatever its spec has in their place.

    It hands the batch on to them, also where the layer is computed again in the backward pass.
    """

    def __init__(self, config, submodules, *, pg_collection, **kwargs) -> None:
        super().__init__(config, submodules, pg_collection=pg_collection, **kwargs)
        # Not through the spec: Megatron gives its groups only to the classes that it knows.
        self.mlp = ExpertLayer(config, pg_collection, self.layer_number)
        self.mlp.set_layer_number(self.layer_number)

    def forward(self, *args, packed_seq_params: AttentionBatch, **kwargs):
        self.mlp.batch = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
