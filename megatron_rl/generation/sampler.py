"""Draws the next tokens from vocabulary shards; every TP rank ends with the same ones.

Shapes: B sequences, V vocabulary columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.truncation import truncation_threshold_T
from megatron_rl.generation.sequence import Sequence
from megatron_rl.generation.transfer import to_device
from megatron_rl.kernels.sampling import Sample, merge, sample_shard, stream_key
from megatron_rl.models.gpt import ParallelModel


@dataclass(kw_only=True, slots=True)
class SamplingBatch:
    """What a draw needs beside logits and positions, on the model's device.

    Attributes:
        temperature_B: fp32.
        stream_B: int64, the key of each sequence's noise.
        truncated: (rows, top_k, top_p, temperature) for each temperature; empty where no sequence
            has top-k or top-p.
        held_back: (row, local column) of end tokens that may not come yet.
    """

    temperature_B: Tensor
    stream_B: Tensor
    truncated: list[tuple[Tensor, Tensor, Tensor, float]]
    held_back: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls, sequences: list[Sequence], model: ParallelModel, *, padding: int = 0
    ) -> SamplingBatch:
        """With rows at the end that stand for no sequence."""
        device = model.device
        params = [s.sampling for s in sequences]
        keys = [stream_key(s.sampling.seed, s.request) for s in sequences]
        truncated = []
        if any(p.top_k or p.top_p < 1 for p in params):
            for temperature in sorted({p.temperature for p in params}):
                rows = [i for i, p in enumerate(params) if p.temperature == temperature]
                truncated.append(
                    (
                        to_device(rows, device),
                        to_device([params[i].top_k for i in rows], device),
                        to_device([params[i].top_p for i in rows], device, torch.float64),
                        temperature or 1.0,
                    )
                )
        return cls(
            temperature_B=to_device(
                [p.temperature for p in params] + [1.0] * padding, device, torch.float32
            ),
            stream_B=to_device(keys + [0] * padding, device), truncated=truncated,
            held_back=_held_back(sequences, model),
        )  # fmt: skip


def draw(
    logits_BV: Tensor, position_B: Tensor, batch: SamplingBatch, model: ParallelModel
) -> Sample:
    """One token per sequence.

    A token depends on its logits, the seed, the request and the position only: neither on TP nor
    on what else is in the batch. Five numbers per token and rank cross the network, and a few more
    where top-k or top-p is on; never the vocabulary.

    Args:
        position_B: int64, where the new token will stand in its sequence.
    """
    if batch.held_back is not None:
        logits_BV[batch.held_back] = -torch.inf
    record_5B = sample_shard(
        logits_BV, batch.temperature_B, batch.stream_B, position_B,
        vocab_size=model.arch.vocab, vocab_start=model.vocab_start,
        threshold_T=_threshold(logits_BV, batch, model),
    )  # fmt: skip
    group = model.groups.tp
    if group.size() == 1:
        return merge(record_5B[None])
    records = [torch.empty_like(record_5B) for _ in range(group.size())]
    dist.all_gather(records, record_5B.contiguous(), group=group)
    return merge(torch.stack(records))


def pack(sample: Sample) -> Tensor:
    """Token, log-prob of the sampled and of the full distribution, [3, B] fp64 (ids are exact)."""
    return torch.stack((sample.token_T.double(), sample.kept_logprob_T, sample.logprob_T))


def _held_back(sequences: list[Sequence], model: ParallelModel) -> tuple[Tensor, Tensor] | None:
    """End tokens of the rows that will not have reached `min_new_tokens` with the next one."""
    width = model.padded_vocab // model.groups.layout.tp
    cells = [
        (row, token - model.vocab_start)
        for row, sequence in enumerate(sequences)
        if sequence.held_back
        for token in sequence.sampling.stop_token_ids
        if 0 <= token - model.vocab_start < width
    ]
    if not cells:
        return None
    rows, columns = to_device(cells, model.device).unbind(1)
    return rows, columns


def _threshold(logits_BV: Tensor, batch: SamplingBatch, model: ParallelModel) -> Tensor | None:
    """The smallest logit that each row's top-k and top-p keep; None: all are kept."""
    if not batch.truncated:
        return None
    threshold_B = torch.full((len(logits_BV),), -torch.inf, device=logits_BV.device)
    for rows, top_k, top_p, temperature in batch.truncated:
        threshold_B[rows] = truncation_threshold_T(
            logits_BV[rows], top_k, top_p, model.groups.tp,
            vocab_start=model.vocab_start, vocab_size=model.arch.vocab,
            padded_vocab_size=model.padded_vocab, temperature=temperature,
        )  # fmt: skip
    return threshold_B
