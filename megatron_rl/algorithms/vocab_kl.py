"""Exact KL divergence between two next-token distributions whose vocabulary is split over ranks.

    KL_t = sum_v p_v (log p_v - log q_v)         dKL / dx_v = p_v (log p_v - log q_v - KL)

with x = logits / temperature, p the policy and q the reference. It needs the reference's logits at
hand, [T, V] a rank, where the estimates of `kl.py` need one number per token.

Shape suffixes: T tokens, V columns of this rank's vocabulary shard, C tokens of one chunk.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.logprobs import LOG_ZERO, shard_logsumexp
from megatron_rl.algorithms.vocab_shard import VocabShard, row_chunks, tempered


def vocab_parallel_kl(
    logits_TV: Tensor,
    ref_logits_TV: Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """KL(policy ‖ reference) of each row over the true vocabulary, [T] fp32, nats.

    Differentiable in `logits_TV` only. Both sets of logits are shards of the same vocabulary; the
    other arguments are those of `vocab_parallel_logprobs`. Five numbers per token on the wire.
    """
    if ref_logits_TV.shape != logits_TV.shape:
        raise ValueError(
            f"the reference's logits {tuple(ref_logits_TV.shape)} must have the policy's shape "
            f"{tuple(logits_TV.shape)}: full KL needs one vocabulary, split alike"
        )
    layout = {
        "group": group,
        "vocab_start": vocab_start,
        "vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size,
    }
    shard = VocabShard.of(logits_TV, **layout)
    lse_T, ref_lse_T = (
        shard_logsumexp(x_TV, **layout, temperature=temperature, chunk=chunk)
        for x_TV in (logits_TV, ref_logits_TV)
    )
    return _FullKL.apply(
        logits_TV, ref_logits_TV.detach(), lse_T, ref_lse_T, shard, temperature, chunk
    )


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, ref_logits_TV, lse_T, ref_lse_T, shard, temperature, chunk):
        ctx.shard, ctx.temperature, ctx.chunk = shard, temperature, chunk
        kl_T = torch.zeros_like(lse_T)
        for rows in row_chunks(logits_TV.shape[0], chunk):
            p_CV, log_ratio_CV = _log_ratio(
                logits_TV, ref_logits_TV, lse_T, ref_lse_T, rows, shard.valid, temperature
            )
            kl_T[rows] = p_CV.mul_(log_ratio_CV).sum(dim=-1)
        shard.sum_(kl_T)
        ctx.save_for_backward(logits_TV, ref_logits_TV, lse_T, ref_lse_T, kl_T)
        return kl_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T: Tensor):
        logits_TV, ref_logits_TV, lse_T, ref_lse_T, kl_T = ctx.saved_tensors
        valid = ctx.shard.valid
        grad_TV = torch.empty_like(logits_TV)
        grad_TV[:, valid:] = 0.0
        for rows in row_chunks(logits_TV.shape[0], ctx.chunk):
            p_CV, log_ratio_CV = _log_ratio(
                logits_TV, ref_logits_TV, lse_T, ref_lse_T, rows, valid, ctx.temperature
            )
            grad_CV = log_ratio_CV.sub_(kl_T[rows, None]).mul_(p_CV).mul_(grad_T[rows, None])
            grad_TV[rows, :valid] = grad_CV.div_(ctx.temperature)
        return grad_TV, None, None, None, None, None, None


def _log_ratio(
    logits_TV: Tensor,
    ref_logits_TV: Tensor,
    lse_T: Tensor,
    ref_lse_T: Tensor,
    rows: slice,
    valid: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """(p, log p - log q) of some rows and the real columns, both fresh."""
    logp_CV = tempered(logits_TV[rows, :valid], temperature).sub_(lse_T[rows, None])
    p_CV = logp_CV.exp()
    logq_CV = tempered(ref_logits_TV[rows, :valid], temperature).sub_(ref_lse_T[rows, None])
    return p_CV, logp_CV.clamp_min_(LOG_ZERO).sub_(logq_CV.clamp_min_(LOG_ZERO))
