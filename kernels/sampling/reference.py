"""Shard sampling in plain torch: the test's yardstick, and the path that runs on a CPU.

Shapes as in the package: T rows, V columns of the shard, R shards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import gumbel, noise_bits


def sample_shard(
    logits_TV: Tensor,
    temperature_T: Tensor,
    stream_T: Tensor,
    position_T: Tensor,
    vocab_size: int,
    vocab_start: int,
    threshold_T: Tensor | None,
) -> Tensor:
    """See `megatron_rl.kernels.sampling.sample_shard`."""
    real = max(0, min(logits_TV.shape[1], vocab_size - vocab_start))
    if real == 0:
        empty_T = torch.full_like(temperature_T, -torch.inf, dtype=torch.float32)
        return torch.stack((empty_T, empty_T, empty_T, torch.full_like(empty_T, -1), empty_T))
    noisy_T1 = (temperature_T > 0)[:, None]
    inverse_tau_T1 = torch.where(noisy_T1, temperature_T[:, None], 1.0).reciprocal()
    logits_TV = logits_TV[:, :real].float()
    scaled_TV = logits_TV * inverse_tau_T1
    lse_T = kept_lse_T = scaled_TV.logsumexp(-1)
    kept_TV = scaled_TV
    if threshold_T is not None:
        kept_TV = scaled_TV.masked_fill(logits_TV < threshold_T[:, None], -torch.inf)
        kept_lse_T = kept_TV.logsumexp(-1)
    ids_V = torch.arange(vocab_start, vocab_start + real, device=logits_TV.device)
    value_TV = gumbel(noise_bits(stream_T, position_T, ids_V)).mul_(noisy_T1).add_(kept_TV)
    # A NaN is never drawn.
    value_T, column_T = value_TV.nan_to_num_(-torch.inf, torch.inf, -torch.inf).max(-1)
    found_T = value_T > -torch.inf
    id_T = torch.where(found_T, column_T + vocab_start, -1).float()
    scaled_T = torch.where(found_T, scaled_TV.gather(1, column_T[:, None]).squeeze(1), -torch.inf)
    return torch.stack((lse_T, kept_lse_T, value_T, id_T, scaled_T))


def choose(records_R5T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `megatron_rl.kernels.sampling.merge`."""
    lse_RT, kept_lse_RT, value_RT, id_RT, scaled_RT = records_R5T.unbind(1)
    shard_1T = value_RT.argmax(0, keepdim=True)
    token_T = id_RT.gather(0, shard_1T)[0].long()
    scaled_T = scaled_RT.gather(0, shard_1T)[0]
    return token_T, scaled_T - lse_RT.logsumexp(0), scaled_T - kept_lse_RT.logsumexp(0)
