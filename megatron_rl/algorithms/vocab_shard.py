"""One rank's slice of a vocabulary that tensor parallelism splits by columns.

Shape suffixes: T tokens, V columns of this rank's vocabulary slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Which vocabulary ids the columns of a logits shard stand for.

    `group=None` means the vocabulary is not split: nothing is sent.
    """

    group: dist.ProcessGroup | None
    start: int  # id of the first column
    width: int  # columns on this rank, padding included
    vocab_size: int  # true vocabulary; ids from here on are padding

    @classmethod
    def of(
        cls,
        logits_TV: Tensor,
        *,
        group: dist.ProcessGroup | None,
        vocab_start: int,
        vocab_size: int,
        padded_vocab_size: int | None = None,
    ) -> VocabShard:
        """Describe `logits_TV`, refusing shapes that cannot be a shard of this vocabulary.

        The width check is the same on every rank, so that all of them refuse together.
        """
        if logits_TV.dim() != 2 or not logits_TV.is_floating_point():
            raise ValueError(
                f"logits must be a floating point tensor of shape [tokens, vocabulary shard], got "
                f"{logits_TV.dtype} {tuple(logits_TV.shape)}; flatten batch and sequence first"
            )
        if vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size} must be at least 1")
        shards = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        width = logits_TV.shape[1]
        if padded_vocab_size is not None:
            fits = width * shards == padded_vocab_size >= vocab_size
        else:
            # A shard that holds nothing but padding looks like gathered logits.
            fits = width * (shards - 1) < vocab_size <= width * shards
        if not fits:
            raise ValueError(
                f"logits with {width} columns on each of {shards} tensor-parallel ranks are not "
                f"shards of vocab_size={vocab_size}, padded_vocab_size={padded_vocab_size}: each "
                "rank must pass its own slice of padded_vocab_size / ranks columns, never gathered "
                "logits (build the output layer with parallel_output=True), and must pass "
                "padded_vocab_size where the last slices hold only padding"
            )
        if vocab_start != rank * width:
            raise ValueError(
                f"vocab_start={vocab_start} on tensor-parallel rank {rank} must be rank × columns "
                f"= {rank * width}; pass the start of this rank's slice"
            )
        return cls(group=group, start=vocab_start, width=width, vocab_size=vocab_size)

    @property
    def valid(self) -> int:
        """Columns that stand for real ids; the padding is always at the end."""
        return min(max(self.vocab_size - self.start, 0), self.width)

    def columns(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id (0 where another rank owns it) and whether this rank owns it."""
        column_T = ids_T.long() - self.start
        owned_T = (column_T >= 0) & (column_T < self.valid)
        return column_T.masked_fill(~owned_T, 0), owned_T

    def sum_(self, tensor: Tensor) -> Tensor:
        return self._reduce_(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        return self._reduce_(tensor, dist.ReduceOp.MAX)

    def _reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None and self.group.size() > 1 and tensor.numel() > 0:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def row_max(self, logits_TV: Tensor) -> Tensor:
        """Largest real logit of each row over all shards, as fp32 or fp64: one all-reduce."""
        dtype = arithmetic_dtype(logits_TV)
        if self.valid:
            max_T = logits_TV[:, : self.valid].amax(dim=-1).to(dtype)
        else:
            max_T = logits_TV.new_full((logits_TV.shape[0],), -math.inf, dtype=dtype)
        return self.max_(max_T)


def arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays (it is what the gradient checks use); everything else is computed in fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """A fresh copy of logits / temperature in the arithmetic type.

    Generation and training both come here, so that the order of operations is the same.
    """
    scaled = logits.to(arithmetic_dtype(logits), copy=True)
    return scaled if temperature == 1.0 else scaled.div_(temperature)


def check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature={temperature} must be a finite number above 0 for log-probs; for greedy "
            "decoding take the argmax and compute untempered log-probs with temperature=1.0"
        )


def row_chunks(n_rows: int, chunk: int) -> list[slice]:
    """Slices of at most `chunk` rows: what bounds the fp32 copies of a logits tensor."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    return [slice(i, min(i + chunk, n_rows)) for i in range(0, n_rows, chunk)]
