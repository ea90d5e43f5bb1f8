"""Forward and backward passes through Megatron's pipeline schedules, for every model.

The one place that knows what Megatron does to a loss. A two-tuple from the loss function would be
divided by the number of micro-batches, in place; a DDP that averages would divide by the data
parallel size; the token count of a three-tuple divides again when gradients are finalised. Our
losses are sums already divided by global counts, so none of this may happen: the configuration sets
`calculate_per_token_loss` (DDP then sums), the loss function returns a three-tuple, and gradients
are finalised without a token count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_rl.engine.microbatch import MicroBatch, fit_schedule
from megatron_rl.models.gpt import ParallelModel

LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


def forward_only(
    model: ParallelModel, batches: list[MicroBatch], fn: Callable[[Tensor, MicroBatch], Any]
) -> list[Any]:
    """Runs micro-batches without gradients.

    Args:
        fn: maps (head output, micro-batch) to a result; called on the last pipeline stage only.

    Returns:
        One result per micro-batch on the last stage, in order; an empty list on other stages.
    """
    count = len(batches)
    batches = fit_schedule(model, batches)
    with torch.no_grad():
        results = _run(model, batches, fn, forward_only=True)
    return results[:count]


def forward_backward(
    model: ParallelModel, batches: list[MicroBatch], loss_fn: LossFunction, count: int
) -> list[dict[str, Tensor]]:
    """Accumulates gradients of Σ losses over all micro-batches and data parallel ranks.

    Args:
        loss_fn: maps (head output, micro-batch) to (loss, metrics); the loss is a sum already
            divided by global counts, metrics are detached sums.
        count: micro-batches that every data parallel rank runs (the maximum over them).

    Returns:
        Metrics of each micro-batch on the last stage; an empty list on other stages.
    """
    return _run(model, fit_schedule(model, batches, count), loss_fn, forward_only=False)


def _run(
    model: ParallelModel, batches: list[MicroBatch], fn: Callable, *, forward_only: bool
) -> list[Any]:
    layout, config = model.groups.layout, model.config
    schedule = schedules.forward_backward_no_pipelining
    if layout.pp > 1:
        schedule = schedules.forward_backward_pipelining_without_interleaving
    if layout.vpp > 1:
        schedule = schedules.forward_backward_pipelining_with_interleaving
    # Megatron divides by this scale when the optimizer steps (fp16 only).
    scale = getattr(config, "grad_scale_func", None)
    assert forward_only or scale is None or config.fp16, "loss scaling is for fp16 only"

    def loss(output: Tensor, batch: MicroBatch, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return fn(output, batch)
        value, metrics = fn(output, batch)
        return value, value.new_zeros((), dtype=torch.int), metrics

    def step(iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
        batch = next(iterator)
        output = chunk(
            input_ids=batch.tokens_T[None], position_ids=None, attention_mask=None,
            packed_seq_params=batch.attention,
        )  # fmt: skip
        return output, partial(loss, batch=batch)

    return schedule(
        forward_step_func=step, data_iterator=[iter(batches) for _ in model.wrapped],
        model=model.wrapped, num_microbatches=len(batches), seq_length=len(batches[0].tokens_T),
        micro_batch_size=1, forward_only=forward_only, collect_non_loss_data=forward_only,
        p2p_communicator=P2PCommunicator(model.groups.pp, config),
        pg_collection=model.groups.collection(),
    )  # fmt: skip


def finalise_gradients(
    chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any
) -> None:
    """Megatron's gradient reductions (DP, sequence parallel norms, tied embeddings) without its
    division by tokens: the losses are already divided."""
    finalize_model_grads(chunks, None, **kwargs)
