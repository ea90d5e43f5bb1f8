"""Draws the next tokens from vocabulary shards; every TP rank ends with the same ones.

Shapes: B sequences, V vocabulary columns of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.truncation import truncation_threshold_T
from megatron_rl.generation.sequence import Sequence
from megatron_rl.kernels.sampling import Sample, merge, sample_shard, stream_key
from megatron_rl.models.gpt import ParallelModel


def draw(logits_BV: Tensor, sequences: list[Sequence], model: ParallelModel) -> Sample:
    """One token per sequence.

    A token depends on its logits, the seed, the request and the position only: neither on TP nor
    on what else is in the batch. Five numbers per token and rank cross the network, and a few more
    where top-k or top-p is on; never the vocabulary.
    """
    device, group = logits_BV.device, model.groups.tp
    params = [s.sampling for s in sequences]
    _hold_back_end_tokens(logits_BV, sequences, model)
    temperature_B = torch.tensor([p.temperature for p in params], device=device)
    record_5B = sample_shard(
        logits_BV, temperature_B,
        torch.tensor([stream_key(s.sampling.seed, s.request) for s in sequences], device=device),
        torch.tensor([len(s.tokens) for s in sequences], device=device),
        vocab_size=model.arch.vocab, vocab_start=model.vocab_start,
        threshold_T=_thresholds(logits_BV, sequences, model),
    )  # fmt: skip
    records = [torch.empty_like(record_5B) for _ in range(group.size())]
    dist.all_gather(records, record_5B.contiguous(), group=group)
    return merge(torch.stack(records))


def _hold_back_end_tokens(
    logits_BV: Tensor, sequences: list[Sequence], model: ParallelModel
) -> None:
    """Removes end tokens from the rows that have not reached `min_new_tokens`."""
    for row, sequence in enumerate(sequences):
        if sequence.generated + 1 < sequence.sampling.min_new_tokens:
            for token in sequence.sampling.stop_token_ids:
                column = token - model.vocab_start
                if 0 <= column < logits_BV.shape[1]:
                    logits_BV[row, column] = -torch.inf


def _thresholds(
    logits_BV: Tensor, sequences: list[Sequence], model: ParallelModel
) -> Tensor | None:
    params = [s.sampling for s in sequences]
    if all(p.top_k == 0 and p.top_p == 1.0 for p in params):
        return None
    device = logits_BV.device
    top_k = torch.tensor([p.top_k for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)
    threshold_B = torch.full((len(params),), -torch.inf, device=device)
    for temperature in sorted({p.temperature for p in params}):
        rows = torch.tensor(
            [i for i, p in enumerate(params) if p.temperature == temperature], device=device
        )
        threshold_B[rows] = truncation_threshold_T(
            logits_BV[rows], top_k[rows], top_p[rows], model.groups.tp,
            vocab_start=model.vocab_start, vocab_size=model.arch.vocab,
            padded_vocab_size=model.padded_vocab, temperature=temperature or 1.0,
        )  # fmt: skip
    return threshold_B
