"""Mistakes that have cost users weeks elsewhere, each as one change that is made inside a rank.

`MUTATIONS[name]` is (the layout that must notice, what is replaced). A replacement is built from
the original when it is applied, and undone afterwards: ranks stay warm between tests.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

Change = tuple[str, str, Callable[[Any], Any]]


def _nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


def _local_counts(original: Any) -> Any:
    """Weights by this replica's tokens instead of all replicas'."""

    def token_weights(mask_BR, aggregation, *, n_tokens, n_sequences, constant=None):
        tokens, sequences = mask_BR.bool().sum(), mask_BR.bool().any(-1).sum()
        return original(
            mask_BR, aggregation, n_tokens=tokens, n_sequences=sequences, constant=constant
        )

    return token_weights


def _count_padding(original: Any) -> Any:
    return lambda mask_BR: (torch.tensor(mask_BR.numel()), torch.tensor(len(mask_BR)))


def _mean_over_micro_batches(original: Any) -> Any:
    """What a two-tuple from the loss function makes Megatron do."""

    def run(model, batches, fn, *, forward_only):
        def divided(output, micro):
            loss, metrics = fn(output, micro)
            return loss / len(batches), metrics

        return original(model, batches, fn if forward_only else divided, forward_only=forward_only)

    return run


def _average_over_replicas(original: Any) -> Any:
    """What Megatron's DDP does unless it is told to sum."""

    def config(*args, **kwargs):
        made = original(*args, **kwargs)
        made.calculate_per_token_loss = False
        return made

    return config


def _inert_with_weight(original: Any) -> Any:
    def inert(*args, **kwargs):
        batch = original(*args, **kwargs)
        batch.fields = {name: torch.ones_like(x) for name, x in batch.fields.items()}
        return batch

    return inert


def _one_long_sequence(original: Any) -> Any:
    """Attention across the bounds of packed sequences."""

    def attention(q_THD, k_TGD, v_TGD, batch, scale, *args):
        batch.lengths = [sum(batch.lengths)]
        batch.cu_seqlens_B1 = batch.cu_seqlens_B1[[0, -1]]
        return original(q_THD, k_TGD, v_TGD, batch, scale, *args)

    return attention


def _positions_of_zero(original: Any) -> Any:
    def pack(*args, **kwargs):
        batch = original(*args, **kwargs)
        batch.attention.positions_T = torch.zeros_like(batch.attention.positions_T)
        return batch

    return pack


def _head_gradient_not_summed(original: Any) -> Any:
    """Every tensor parallel rank keeps the part of the gradient that its vocabulary gives."""
    return lambda *args, sharded, **kwargs: original(*args, sharded=False, **kwargs)


def _value_gradient_summed(original: Any) -> Any:
    """A replicated head's gradient taken for a sharded one's: multiplied by TP."""
    return lambda *args, sharded, **kwargs: original(*args, sharded=True, **kwargs)


def _rows_shifted(original: Any) -> Any:
    """The head reads the state of one token too early."""

    def select(hidden, rows_N, **kwargs):
        return original(hidden, (rows_N - 1).clamp(min=0), **kwargs)

    return select


def _local_label_only(original: Any) -> Any:
    """Sums over vocabulary shards left out."""
    return lambda self, tensor: tensor


def _train_the_mask(original: Any) -> Any:
    """Tool output trained like the policy's own tokens."""

    def token_weights(mask_BR, *args, **kwargs):
        return original((mask_BR.cumsum(-1) > 0).float(), *args, **kwargs)

    return token_weights


_FINALISE = "megatron.core.distributed.finalize_model_grads"
_DDP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_UPDATE = "megatron_rl.engine.update"

MUTATIONS: dict[str, tuple[dict[str, Any], Change]] = {
    "drop_the_dp_scale": (dict(dp=2), (_UPDATE, "token_weights", _local_counts)),
    "count_padding": (dict(dp=2), (_UPDATE, "count_tokens", _count_padding)),
    "train_masked_tokens": (dict(), (_UPDATE, "token_weights", _train_the_mask)),
    "divide_by_micro_batches": (
        dict(micro=2), ("megatron_rl.engine.schedule", "_run", _mean_over_micro_batches)
    ),
    "average_over_replicas": (
        dict(dp=2), ("megatron_rl.models.gpt", "transformer_config", _average_over_replicas)
    ),
    "skip_the_dp_sum": (dict(dp=2), (_DDP, "finish_grad_sync", _nothing)),
    "skip_the_manual_sum": (
        dict(dp=2, reduce="manual"),
        ("megatron_rl.engine.optimizer", "_reduce_once_and_finalise",
         lambda original: importlib.import_module("megatron_rl.engine.schedule").finalise_gradients)
    ),
    "skip_the_tied_embedding_sum": (
        dict(pipeline="pp2"), (_FINALISE, "_allreduce_word_embedding_grads", _nothing)
    ),
    "skip_the_sequence_parallel_norm_sum": (
        dict(tensor="tp2_sp"),
        (_FINALISE, "_allreduce_non_tensor_model_parallel_grads", _nothing),
    ),
    "skip_the_head_gradient_sum": (
        dict(tensor="tp2"), ("megatron_rl.models.gpt", "select_rows", _head_gradient_not_summed)
    ),
    "sum_the_value_gradient": (
        dict(tensor="tp2_sp"), ("megatron_rl.models.gpt", "select_rows", _value_gradient_summed)
    ),
    "skip_the_vocabulary_sum": (
        dict(tensor="tp2"),
        ("megatron_rl.algorithms.vocab_shard:VocabShard", "sum_", _local_label_only),
    ),
    "inert_micro_batch_with_weight": (
        dict(dp=2, micro=1), ("megatron_rl.engine.microbatch", "inert", _inert_with_weight)
    ),
    "attend_across_sequences": (
        dict(), ("megatron_rl.models.attention", "packed_causal_attention", _one_long_sequence)
    ),
    "positions_of_zero": (dict(), ("megatron_rl.engine.passes", "pack", _positions_of_zero)),
    "head_reads_an_earlier_state": (
        dict(packing=False), ("megatron_rl.models.gpt", "select_rows", _rows_shifted)
    ),
}  # fmt: skip
"""Name → (axes that differ from one rank, (module or module:class, attribute, replacement))."""


@contextlib.contextmanager
def applied(name: str | None) -> Iterator[None]:
    """The mutation inside the block; None changes nothing."""
    if name is None:
        yield
        return
    place, attribute, replacement = MUTATIONS[name][1]
    module, _, member = place.partition(":")
    owner = importlib.import_module(module)
    owner = getattr(owner, member) if member else owner
    original = getattr(owner, attribute)
    with mock.patch.object(owner, attribute, replacement(original)):
        yield
