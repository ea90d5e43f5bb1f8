"""One pipeline stage without gradients: the trained layers' own weights, less work between them.

Same arithmetic as Megatron's layers, without the calls of its modules: they cost the host more time
than a short step costs the device. The residual addition and the norm that follows it are one
kernel, so is the gated activation, and a single row goes through kernels that do all of this while
the weights arrive.

Shapes: T tokens, E hidden size, V vocabulary rows on this TP rank, N rows, G KV heads of this rank,
R query heads per KV head, D head dimension.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.kernels.backend import use_triton
from megatron_rl.kernels.rms_norm import rms_norm
from megatron_rl.kernels.swiglu import swiglu
from megatron_rl.kernels.thin_linear import Norm, thin_linear
from megatron_rl.models.attention import AttentionBatch
from megatron_rl.models.experts import ExpertLayer
from megatron_rl.models.gpt import RLModel
from megatron_rl.models.heads import vocabulary_logits

# Rows up to which the thin layer beats the matrix library (LOG.md); the kernel takes more.
THIN_ROWS = 1
# Rows up to which a CPU's matrix library is faster with the weights as the left factor.
LEFT_ROWS = 64


@torch.no_grad()
def stage_forward(
    chunk: RLModel, tokens_T: Tensor, hidden_TE: Tensor | None, batch: AttentionBatch
) -> Tensor:
    """A stage of the model over a flat token stream, sequence parallelism off.

    Args:
        tokens_T: ids, for the first stage's embedding.
        hidden_TE: what the stage before sent; None on the first stage.

    Returns:
        Hidden states `[T, E]` for the next stage, or logits `[N, V]` of `batch.rows_N` (all T rows
        where that is None) on the last.
    """
    if hidden_TE is None:
        hidden_TE = chunk.embedding(input_ids=tokens_T[None], position_ids=None)[:, 0]
    x, residual = hidden_TE, None
    for layer in chunk.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        tp = attention.pg_collection.tp
        q, k, v, residual = _query_key_value(attention, layer.input_layernorm, x, residual, batch)
        x = attention.core_attention(q, k, v, packed_seq_params=batch)
        x = _reducing_linear(attention.linear_proj, x, tp)
        if isinstance(mlp, ExpertLayer):
            x, residual = _experts(layer, x, residual, batch)
            continue
        x, residual = _normed_linear(
            layer.pre_mlp_layernorm, mlp.linear_fc1, x, residual, gated=True
        )
        x = _reducing_linear(mlp.linear_fc2, x, tp)
    if not chunk.post_process:
        return x if residual is None else x + residual
    if batch.rows_N is not None:
        x, residual = (y.index_select(0, batch.rows_N) for y in (x, residual))
    norm = chunk.decoder.final_layernorm
    x, _ = rms_norm(x, norm.weight, norm.eps, residual)
    weight = chunk.head_weight()
    if _weights_left(x, weight):
        return _linear(x, weight).contiguous()
    return vocabulary_logits(x, weight)


def _thin(x_TE: Tensor) -> bool:
    return len(x_TE) <= THIN_ROWS and use_triton("thin_linear", x_TE)


def _weights_left(x_TE: Tensor, weight: Tensor) -> bool:
    few = not x_TE.is_cuda and weight.dtype == torch.float32 and 1 < len(x_TE) <= LEFT_ROWS
    return few and not use_triton("thin_linear", x_TE)  # our kernels want dense rows


def _linear(x_TE: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x · weightᵀ + bias`.

    On a CPU with two threads, MKL takes half the time for `weight · xᵀ` of few rows (LOG.md). The
    result is then a transposed view; element by element and in the next product that costs nothing.
    """
    if not _weights_left(x_TE, weight):
        return F.linear(x_TE, weight, bias)
    if bias is None:
        return torch.mm(weight, x_TE.t()).t()
    return torch.addmm(bias[:, None], weight, x_TE.t()).t()


def _normed_linear(
    norm: torch.nn.Module, linear: torch.nn.Module, x_TE: Tensor, residual_TE: Tensor | None, *,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A column-parallel layer after `norm(x + residual)`; with the new residual stream."""
    # Transformer Engine's layers without a bias have an empty one.
    bias = linear.bias if linear.bias is not None and linear.bias.numel() else None
    if _thin(x_TE):
        before = Norm(weight_K=norm.weight, eps=norm.eps, residual_BK=residual_TE)
        return thin_linear(x_TE, linear.weight, bias, norm=before, gated=gated)
    x_TE, residual_TE = rms_norm(x_TE, norm.weight, norm.eps, residual_TE)
    y = _linear(x_TE, linear.weight, bias)
    return swiglu(y) if gated else y, residual_TE


def _reducing_linear(linear: torch.nn.Module, x: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """A row-parallel layer."""
    y_TE = thin_linear(x, linear.weight)[0] if _thin(x) else _linear(x, linear.weight)
    return _summed(y_TE, tp)


def _summed(y: Tensor, tp: dist.ProcessGroup) -> Tensor:
    if tp.size() > 1:
        dist.all_reduce(y, group=tp)
    return y


def _experts(
    layer: torch.nn.Module, x_TE: Tensor, residual_TE: Tensor | None, batch: AttentionBatch
) -> tuple[Tensor, Tensor]:
    """The experts of a layer after its norm, and the new residual stream; keeps the routes."""
    mlp, norm, cache = layer.mlp, layer.pre_mlp_layernorm, batch.cache
    x_TE, residual_TE = rms_norm(x_TE, norm.weight, norm.eps, residual_TE)
    weights_TK, experts_TK = mlp.router(x_TE)
    if cache is not None and cache.routes is not None:
        routes = cache.routes[layer.self_attention.core_attention.cache_layer]
        routes[cache.slots_T] = experts_TK[: len(cache.slots_T)].to(routes.dtype)
    y_TE = mlp.partial_outputs(x_TE, weights_TK, experts_TK, fixed_size=cache.decode)
    return _summed(y_TE, mlp.attn_tp_group), residual_TE


def _query_key_value(
    attention: torch.nn.Module, norm: torch.nn.Module, x_TE: Tensor, residual_TE: Tensor | None,
    batch: AttentionBatch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys `[T, G, D]`, values `[T, G, D]` and the new residual stream.

    Queries are `[T, G, R, D]`, as they lie in the fused output, where our decode kernels read
    them; else `[T, G·R, D]`.
    """
    if attention.config.num_query_groups < attention.world_size:  # KV heads are spread over TP
        x_TE, residual_TE = rms_norm(x_TE, norm.weight, norm.eps, residual_TE)
        q, k, v = attention.get_query_key_value_tensors(x_TE[:, None])
        return q.squeeze(1), k.squeeze(1), v.squeeze(1), residual_TE
    fused, residual_TE = _normed_linear(norm, attention.linear_qkv, x_TE, residual_TE)
    groups = attention.num_query_groups_per_partition
    fused = fused.view(len(fused), groups, -1, attention.hidden_size_per_attention_head)
    q, k, v = fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]
    if attention.q_layernorm is not None:
        q = attention.q_layernorm(q)
    if attention.k_layernorm is not None:
        k = attention.k_layernorm(k)
    by_kernels = batch.cache is not None and batch.cache.rope_PR is not None
    return q if by_kernels else q.flatten(1, 2), k, v, residual_TE
