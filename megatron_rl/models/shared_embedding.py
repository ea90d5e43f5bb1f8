"""One embedding table for two models of one layout.

The owner trains it: the table is part of its gradient buffers, optimizer and checkpoint. The reader
looks rows up in the same memory, and either leaves it alone (read only) or hands the gradient of
its own loss over to the owner, whose optimizer then steps along the sum of both (joint).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.models.gpt import ParallelModel


class JointTable:
    """Takes the reader's gradient of the shared table to the owner's `main_grad`.

    The gradient waits in fp32, the precision of `main_grad`, from the reader's backward passes to
    the owner's: the gradient buffers of both models need not exist at the same time. It is this
    replica's part; the owner's own reduction sums it over the replicas.

    Args:
        owner: the table as the owner's parameter.
        reader: the same memory as a leaf of the reader's graph.
    """

    def __init__(self, owner: torch.nn.Parameter, reader: Tensor) -> None:
        self._owner = owner
        self._gradient: Tensor | None = None
        reader.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, reader: Tensor) -> None:
        if self._gradient is None:
            self._gradient = torch.zeros_like(reader, dtype=torch.float32)
        self._gradient += reader.grad
        reader.grad = None

    def hand_over(self) -> None:
        """Adds what the reader's backward passes gave to the owner's gradient, once.

        Call it when the owner's gradients were zeroed and before its backward passes, which may
        start the reduction.
        """
        if self._gradient is not None:
            self._owner.main_grad += self._gradient
            self._gradient = None


class SharedEmbedding:
    """Makes the reader's embedding table the owner's, in place.

    The table is no parameter of the reader any more: its DDP buffer, optimizer and checkpoint have
    no part of it. Make this after the owner was wrapped for training (which moves its parameters)
    and before the reader is.

    Args:
        joint: the reader's gradient is kept for the owner; otherwise none reaches the table.

    Attributes:
        saved_bytes: of weights that this rank no longer holds twice.
        joint: whether the reader's gradient counts.
    """

    def __init__(self, owner: ParallelModel, reader: ParallelModel, *, joint: bool) -> None:
        self.saved_bytes, self.joint = 0, joint
        self._tables: list[JointTable] = []
        for theirs, mine in zip(owner.chunks, reader.chunks, strict=True):
            if mine.pre_process:
                table = theirs.embedding.word_embeddings.weight
                self._share(table, mine.embedding)

    def _share(self, table: torch.nn.Parameter, embedding: torch.nn.Module) -> None:
        module, view = embedding.word_embeddings, table.detach()
        assert table.shape == module.weight.shape, "the models must be cut alike"
        self.saved_bytes += module.weight.nbytes
        del module.weight
        if self.joint:
            self._tables.append(JointTable(table, view.requires_grad_()))
        else:
            embedding.register_forward_hook(_join_the_graph)
        module.register_buffer("weight", view, persistent=False)

    def hand_over(self) -> None:
        """See `JointTable.hand_over`; nothing to do on stages without a table."""
        for table in self._tables:
            table.hand_over()


def _join_the_graph(module: torch.nn.Module, args: Any, hidden: Tensor) -> Tensor:
    """Recomputed layers get gradients only if their input asks for one."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden
