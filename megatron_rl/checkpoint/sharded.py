"""Entries as Megatron-Core's sharded tensors: what torch's checkpoint planner reads and writes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)

from megatron_rl.checkpoint.cuts import Piece
from megatron_rl.checkpoint.tensors import Entry


def sharded_tensors(
    entries: Iterable[Entry], *, writing: bool, copy_to_cpu: bool = False
) -> dict[str, torch.Tensor]:
    """Name → this rank's pieces of the tensor.

    Args:
        writing: only pieces that this rank writes; otherwise all that it holds, to be filled.
        copy_to_cpu: pieces are copies, which later training cannot change.
    """
    shards: dict[str, list[CheckpointableShardedTensor]] = {}
    for entry in entries:
        if writing and not entry.mine:
            continue
        for piece in entry.pieces():
            shard = _megatron_shard(entry, piece, copy_to_cpu)
            shards.setdefault(entry.name, []).append(shard)
    return {
        name: parts[0] if len(parts) == 1 else LocalShardsContainer(parts)
        for name, parts in shards.items()
    }


def _megatron_shard(entry: Entry, piece: Piece, copy: bool) -> CheckpointableShardedTensor:
    data = piece.data.to("cpu", copy=True) if copy else piece.data
    return CheckpointableShardedTensor.from_sh_ten(
        ShardedTensor(
            key=entry.name, data=data, dtype=data.dtype, local_shape=tuple(data.shape),
            global_shape=entry.cut.shape, global_offset=piece.offset, axis_fragmentations=None,
        )
    )  # fmt: skip
