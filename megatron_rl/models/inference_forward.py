"""One pipeline stage without gradients: the trained layers' own weights, less work between them.

Same arithmetic as Megatron's layers, whose modules do the linear parts; the residual addition and
the norm that follows it are one kernel, and there is nothing that only training needs.

Shapes: T tokens, E hidden size, V vocabulary rows on this TP rank, N rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.kernels.rms_norm import rms_norm
from megatron_rl.models.attention import AttentionBatch
from megatron_rl.models.gpt import RLModel
from megatron_rl.models.heads import vocabulary_logits


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
        norm, attention = layer.input_layernorm, layer.self_attention
        x, residual = rms_norm(x, norm.weight, norm.eps, residual)
        q, k, v = attention.get_query_key_value_tensors(x[:, None])
        x = attention.core_attention(
            q.squeeze(1), k.squeeze(1), v.squeeze(1), packed_seq_params=batch
        )
        x = attention.linear_proj(x[:, None])[0][:, 0]
        norm = layer.pre_mlp_layernorm
        x, residual = rms_norm(x, norm.weight, norm.eps, residual)
        x = layer.mlp(x[:, None])[0][:, 0]
    if not chunk.post_process:
        return x if residual is None else x + residual
    if batch.rows_N is not None:
        x, residual = (y.index_select(0, batch.rows_N) for y in (x, residual))
    norm = chunk.decoder.final_layernorm
    x, _ = rms_norm(x, norm.weight, norm.eps, residual)
    return vocabulary_logits(x, chunk.head_weight())
