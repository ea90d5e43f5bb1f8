"""One embedding table for two models of one layout: the owner trains it, the reader reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.models.gpt import ParallelModel


def read_embedding_of(owner: ParallelModel, reader: ParallelModel) -> int:
    """Makes the reader's embedding table the owner's, in place and detached.

    The table is no parameter of the reader any more: its DDP buffer, optimizer and checkpoint have
    no part of it, and no gradient reaches it. Call this after the owner was wrapped for training
    (which moves its parameters) and before the reader is.

    Returns:
        Bytes of weights that this rank no longer holds twice.
    """
    saved = 0
    for theirs, mine in zip(owner.chunks, reader.chunks, strict=True):
        if not mine.pre_process:
            continue
        table, module = theirs.embedding.word_embeddings, mine.embedding.word_embeddings
        assert table.weight.shape == module.weight.shape, "the models must be cut alike"
        saved += module.weight.nbytes
        del module.weight
        module.register_buffer("weight", table.weight.detach(), persistent=False)
        mine.embedding.register_forward_hook(_join_the_graph)
    return saved


def _join_the_graph(module: torch.nn.Module, args: Any, hidden: Tensor) -> Tensor:
    """Recomputed layers get gradients only if their input asks for one."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden
