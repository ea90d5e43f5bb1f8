"""Sampling the next token from vocabulary shards, on the device, without moving the vocabulary.

The draw is Gumbel-max (Gumbel 1954; Maddison et al. 2014): with independent g_i ~ Gumbel(0, 1),

    argmax_i (x_i / τ + g_i)   is distributed as   softmax(x / τ).

The noise g_i is a pure function of (stream, position, global token id), so a token depends neither
on how the vocabulary is cut over ranks nor on its batch mates: a maximum has no rounding. (An
inverse CDF over fp32 shard sums has: each of its V boundaries moves, which on four shards of a
nearly flat 128k vocabulary changed one token in twenty; see bench.py.) One pass over the logits
yields a record of five numbers per token and shard; records merge in any grouping, so ranks
all-gather 20 bytes a token:

    records_R5T = all_gather(sample_shard(logits_TV, ...))      # one collective
    sample = merge(records_R5T)                                 # the same on every rank

Shapes: T tokens (rows), V columns of this shard, R shards, 5 record fields in order: log-sum-exp of
x/τ, the same over kept tokens, best perturbed value, its token id, its x/τ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import use_triton
from . import reference
from .arguments import check_rows
from .noise import stream_key
from .threshold import kept_threshold

__all__ = ["Sample", "kept_threshold", "merge", "sample", "sample_shard", "stream_key"]


class Sample(NamedTuple):
    """One drawn token per row.

    Attributes:
        token_T: int64 token ids; −1 where a row has no kept token with a finite logit.
        logprob_T: fp32 log-probability under softmax(x / τ) over the whole vocabulary (τ = 1 where
            the temperature is 0).
        kept_logprob_T: fp32 log-probability under the same softmax cut to the kept tokens, the
            distribution that was sampled.
    """

    token_T: Tensor
    logprob_T: Tensor
    kept_logprob_T: Tensor


def sample_shard(
    logits_TV: Tensor,
    temperature_T: Tensor,
    stream_T: Tensor,
    position_T: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    threshold_T: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One shard's record of the draw.

    Args:
        logits_TV: `[T, V]` bf16, fp16 or fp32, last dimension contiguous.
        temperature_T: fp32 `[T]` ≥ 0; 0 is greedy (lowest id on ties), with log-probs at τ = 1.
        stream_T: int64 `[T]`, `stream_key(seed, request)` of each row.
        position_T: int64 `[T]`, position of the token being drawn.
        vocab_size: real tokens of the whole vocabulary; ids from there on are padding.
        vocab_start: global id of this shard's first column.
        threshold_T: fp32 `[T]`, lowest kept logit (`kept_threshold`); None keeps all.
        backend: `auto`, `triton` or `torch`; log-probs differ by rounding only.

    Returns:
        fp32 `[5, T]`.

    Raises:
        ValueError: shapes or devices that do not fit, or a vocabulary above 2^24.
    """
    check_rows(logits_TV, vocab_size, temperature_T, stream_T, position_T, threshold_T)
    if use_triton("sampling", logits_TV, backend):
        from . import kernel

        records_C5T = kernel.shard_records(
            logits_TV, temperature_T, stream_T, position_T, vocab_size, vocab_start, threshold_T
        )
        return kernel.merge_records(records_C5T)
    return reference.sample_shard(
        logits_TV, temperature_T, stream_T, position_T, vocab_size, vocab_start, threshold_T
    )


def merge(records_R5T: Tensor, *, backend: str = "auto") -> Sample:
    """The drawn token from the records of all shards, in the order of their vocabulary slices.

    Raises:
        ValueError: not a fp32 `[R, 5, T]` tensor.
    """
    if records_R5T.ndim != 3 or records_R5T.shape[1] != 5 or records_R5T.dtype != torch.float32:
        raise ValueError(
            f"records must be fp32 [R, 5, T], got {records_R5T.dtype} {tuple(records_R5T.shape)}"
        )
    if use_triton("sampling", records_R5T, backend):
        from . import kernel

        return Sample(*kernel.choose(records_R5T))
    return Sample(*reference.choose(records_R5T))


def sample(
    logits_TV: Tensor,
    temperature_T: Tensor,
    stream_T: Tensor,
    position_T: Tensor,
    *,
    vocab_size: int,
    threshold_T: Tensor | None = None,
    backend: str = "auto",
) -> Sample:
    """`merge` of one `sample_shard`, for a vocabulary that is not cut; one launch less on a GPU."""
    check_rows(logits_TV, vocab_size, temperature_T, stream_T, position_T, threshold_T)
    inputs = (logits_TV, temperature_T, stream_T, position_T, vocab_size, 0, threshold_T)
    if use_triton("sampling", logits_TV, backend):
        from . import kernel

        return Sample(*kernel.choose(kernel.shard_records(*inputs)))
    return Sample(*reference.choose(reference.sample_shard(*inputs)[None]))
