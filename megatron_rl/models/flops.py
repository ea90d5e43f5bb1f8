"""Operations of forward passes: two per multiply-add of every matrix product."""

from __future__ import annotations

from megatron_rl.models.architecture import Architecture


def forward_flops(
    arch: Architecture, *, tokens: float, contexts: float, rows: float, vocabulary: bool
) -> float:
    """Operations of a forward pass.

    Args:
        tokens: tokens that pass through the layers.
        contexts: keys they meet, added up.
        rows: tokens that pass through the head: the vocabulary projection, or a value head.
    """
    attention = arch.heads * arch.head_dim
    mlp = 3 * arch.ffn
    if arch.experts is not None:
        mlp = mlp * arch.experts.per_token + arch.experts.count
    weights = arch.hidden * (2 * attention + 2 * arch.kv_heads * arch.head_dim + mlp)
    layers = arch.layers * (2 * weights * tokens + 4 * attention * contexts)
    return layers + 2 * arch.hidden * (arch.vocab if vocabulary else 1) * rows


def sample_flops(arch: Architecture, tokens: int, rows: int) -> float:
    """Operations of one causal forward pass over one sequence; the vocabulary head computes the
    last `rows` positions. What micro-batches and replicas are balanced by."""
    contexts = tokens * tokens / 2
    return forward_flops(arch, tokens=tokens, contexts=contexts, rows=rows, vocabulary=True)
