"""Log-probs and entropy on vocabulary shards: fp32, chunked over tokens, nothing gathered.

With x = logits / temperature, m = max x, z = x - m, S = sum exp z over the real vocabulary:

    logp(y) = z_y - log S                      H = log S - (sum exp(z) z) / S
    d logp(y) / dx_v = [v = y] - p_v           dH / dx_v = -p_v (log p_v + H)

Each rank contributes its max, its part of S, of sum exp(z) z and the label's z if it owns the
label: one MAX and one SUM all-reduce of [T]-sized vectors forward, none backward. The fp32 copy of
the logits exists for `chunk` tokens at a time, in both directions; the backward recomputes it.

Shape suffixes: T tokens, V columns of this rank's vocabulary shard, C tokens of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.vocab_shard import (
    VocabShard,
    check_temperature,
    row_chunks,
    tempered,
)

# Stands in for log 0: p · log p must be 0 · finite, as 0 · -inf is NaN.
LOG_ZERO = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distribution:
    """How logits become the distribution that the log-probs are of."""

    shard: VocabShard
    temperature: float
    chunk: int


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
    with_entropy: bool = False,
    min_logit_T: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs of `labels_T`, and the entropy of each row's distribution on request.

    Args:
        logits_TV: this rank's slice of the logits, any float type, untempered. Gradients come back
            in this type.
        labels_T: int32 or int64 global token ids in [0, vocab_size), the same on every rank of
            `group`. A negative label marks a slot without a target: log-prob 0, no gradient.
        group: tensor-parallel group over which the vocabulary is split; None if it is not.
        vocab_start: id of the first column, rank × V.
        vocab_size: true vocabulary; columns of ids from here on are padding and never count.
        padded_vocab_size: V × ranks. Pass it: it is what tells a shard from gathered logits.
        temperature: divides the logits, as it did in generation. Above 0.
        chunk: tokens whose fp32 logits exist at a time.
        with_entropy: return (logprobs_T, entropy_T), both differentiable. Nats.
        min_logit_T: smallest logit kept by top-k/top-p (see `truncation_threshold_T`): log-probs
            are then of the truncated distribution. The label itself always counts as kept, so that
            no log-prob is ever -inf when the policy has moved since the token was drawn.

    Returns:
        logprobs_T, or (logprobs_T, entropy_T): fp32 (float64 for float64 logits), the same on
        every rank of `group`.

    Every rank of `group` must call this with the same T. The loss on top must be computed alike on
    all of them (it is: its inputs are equal), each then gets the gradient of its own slice.
    """
    check_temperature(temperature)
    shard = VocabShard.of(
        logits_TV,
        group=group,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
    )
    _check_labels(labels_T, logits_TV, vocab_size)
    how = _Distribution(shard=shard, temperature=temperature, chunk=chunk)
    logprobs_T, entropy_T = _LogProbs.apply(logits_TV, labels_T, min_logit_T, how, with_entropy)
    return (logprobs_T, entropy_T) if with_entropy else logprobs_T


@torch.no_grad()
def shard_logsumexp(
    logits_TV: Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
    min_logit_T: Tensor | None = None,
) -> Tensor:
    """log sum exp(logits / temperature) over all shards, [T] fp32; not differentiable.

    Arguments as in `vocab_parallel_logprobs`. Two numbers per token on the wire.
    """
    check_temperature(temperature)
    shard = VocabShard.of(
        logits_TV,
        group=group,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
    )
    how = _Distribution(shard=shard, temperature=temperature, chunk=chunk)
    no_label_T = torch.full(logits_TV.shape[:1], -1, device=logits_TV.device)
    max_T = shard.row_max(logits_TV) / temperature
    sums_2T = _partial_sums(logits_TV, no_label_T, min_logit_T, max_T, how, with_entropy=False)
    return max_T + shard.sum_(sums_2T[0]).log()


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, labels_T, min_logit_T, how: _Distribution, with_entropy: bool):
        max_T = how.shard.row_max(logits_TV) / how.temperature
        sums = _partial_sums(logits_TV, labels_T, min_logit_T, max_T, how, with_entropy)
        exp_T, label_T, *exp_z_T = how.shard.sum_(sums).unbind(0)
        log_sum_T = exp_T.log()
        logprobs_T = (label_T - log_sum_T).masked_fill_(labels_T < 0, 0.0)
        entropy_T = log_sum_T - exp_z_T[0] / exp_T if with_entropy else None
        ctx.save_for_backward(logits_TV, labels_T, min_logit_T, max_T + log_sum_T, entropy_T)
        ctx.how = how
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T: Tensor, grad_entropy_T: Tensor | None):
        logits_TV, labels_T, min_logit_T, logsumexp_T, entropy_T = ctx.saved_tensors
        shard: VocabShard = ctx.how.shard
        column_T, owned_T = shard.columns(labels_T)
        grad_logp_T = grad_logp_T.masked_fill(labels_T < 0, 0.0)
        at_label_T = torch.where(owned_T, grad_logp_T, 0.0)
        grad_TV = torch.empty_like(logits_TV)
        grad_TV[:, shard.valid :] = 0.0
        for rows in row_chunks(logits_TV.shape[0] if shard.valid else 0, ctx.how.chunk):
            logp_CV = _tempered_rows(logits_TV, rows, labels_T, min_logit_T, ctx.how)
            logp_CV.sub_(logsumexp_T[rows, None])
            if entropy_T is None:
                grad_CV = logp_CV.exp_().mul_(-grad_logp_T[rows, None])
            else:
                grad_CV = _joint_gradient(
                    logp_CV, entropy_T[rows], grad_logp_T[rows], grad_entropy_T[rows]
                )
            grad_CV.scatter_add_(1, column_T[rows, None], at_label_T[rows, None])
            grad_TV[rows, : shard.valid] = grad_CV.div_(ctx.how.temperature)
            del logp_CV, grad_CV  # or they live on beside the next chunk's
        return grad_TV, None, None, None, None


def _joint_gradient(
    logp_CV: Tensor, entropy_C: Tensor, grad_logp_C: Tensor, grad_entropy_C: Tensor
) -> Tensor:
    """-p (g + g_H (log p + H)), without the label's own term; overwrites `logp_CV`."""
    p_CV = logp_CV.exp()
    grad_CV = logp_CV.clamp_min_(LOG_ZERO).add_(entropy_C[:, None])
    grad_CV.mul_(grad_entropy_C[:, None]).add_(grad_logp_C[:, None])
    return grad_CV.mul_(p_CV).neg_()


def _partial_sums(
    logits_TV: Tensor,
    labels_T: Tensor,
    min_logit_T: Tensor | None,
    max_T: Tensor,
    how: _Distribution,
    with_entropy: bool,
) -> Tensor:
    """This rank's part of (sum exp z, label's z[, sum exp(z) z]), one row each, [2 or 3, T]."""
    sums = max_T.new_zeros(3 if with_entropy else 2, logits_TV.shape[0])
    column_T, owned_T = how.shard.columns(labels_T)
    for rows in row_chunks(logits_TV.shape[0] if how.shard.valid else 0, how.chunk):
        z_CV = _tempered_rows(logits_TV, rows, labels_T, min_logit_T, how)
        z_CV.sub_(max_T[rows, None])
        label_C = z_CV.gather(1, column_T[rows, None]).squeeze(1)
        sums[1, rows] = torch.where(owned_T[rows], label_C, 0.0)
        if with_entropy:
            exp_CV = z_CV.exp()
            sums[0, rows] = exp_CV.sum(dim=-1)
            sums[2, rows] = exp_CV.mul_(z_CV.clamp_min_(LOG_ZERO)).sum(dim=-1)
            del exp_CV
        else:
            sums[0, rows] = z_CV.exp_().sum(dim=-1)
        del z_CV  # or it lives on beside the next chunk's
    return sums


def _tempered_rows(
    logits_TV: Tensor,
    rows: slice,
    labels_T: Tensor,
    min_logit_T: Tensor | None,
    how: _Distribution,
) -> Tensor:
    """Fresh tempered logits of some rows and the real columns; -inf where truncation drops them."""
    logits_CV = logits_TV[rows, : how.shard.valid]
    x_CV = tempered(logits_CV, how.temperature)
    if min_logit_T is None:
        return x_CV
    dropped_CV = logits_CV < min_logit_T[rows, None]
    column_C, owned_C = how.shard.columns(labels_T[rows])
    label_dropped_C1 = dropped_CV.gather(1, column_C[:, None]) & ~owned_C[:, None]
    dropped_CV.scatter_(1, column_C[:, None], label_dropped_C1)
    return x_CV.masked_fill_(dropped_CV, -torch.inf)


def _check_labels(labels_T: Tensor, logits_TV: Tensor, vocab_size: int) -> None:
    if labels_T.shape != logits_TV.shape[:1] or labels_T.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"labels must be token ids of shape [{logits_TV.shape[0]}], one for each row of the "
            f"logits, got {labels_T.dtype} {tuple(labels_T.shape)}"
        )
    in_range = (labels_T < vocab_size).all()
    if labels_T.is_cuda:
        # Raising here would make the host wait for the device at every micro-batch.
        torch._assert_async(in_range, f"a label is not below vocab_size={vocab_size}")
    elif not in_range:
        raise ValueError(
            f"label {int(labels_T.max())} is not below vocab_size={vocab_size}: padding ids have "
            "no log-prob; use a negative label where there is no target"
        )
