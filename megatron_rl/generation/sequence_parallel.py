"""Sequence parallelism is for long streams: decoding one token at a time runs without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_rl.models.gpt import ParallelModel

# Megatron copies the setting into its layers when they are built.
_COPIES = ("sequence_parallel", "reduce_scatter_embeddings")


@contextmanager
def sequence_parallel_off(model: ParallelModel) -> Iterator[None]:
    """Switches sequence parallelism off for forward passes without gradients, and on again.

    Restores every flag on exceptions, too: training before and after is bitwise the same.
    """
    if not model.config.sequence_parallel:
        yield
        return
    flipped: list[tuple[torch.nn.Module, str]] = [
        (module, name)
        for chunk in model.chunks
        for module in chunk.modules()
        for name in _COPIES
        if getattr(module, name, None) is True
    ]
    model.config.sequence_parallel = False
    for module, name in flipped:
        setattr(module, name, False)
    try:
        yield
    finally:
        model.config.sequence_parallel = True
        for module, name in flipped:
            setattr(module, name, True)
