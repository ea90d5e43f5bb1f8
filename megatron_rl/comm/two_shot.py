"""Two-shot int8 reduction: the protocol on plain tensors and one process group.

Shape suffixes: N ranks of the group, S values of one rank's shard, C columns of a chunk (a slice
of S), K scale blocks of a chunk, M message bytes.

Every rank holds a gradient seen as [N, S]; row n is what rank n will own.

    shot 1   quantise all rows → all-to-all → dequantise and sum the own row in fp32
    shot 2   requantise the sum → all-gather → dequantise all rows

Shot 2 is for optimizers that need the whole gradient everywhere; the owner, too, takes what it
sent, so all ranks end with the same bits. A sharded optimizer stops after shot 1 and has one
quantisation error instead of two. Per element and rank 2(N-1)/N · (1 + 4/block) bytes are sent
(half of it without shot 2), against 8(N-1)/N for an fp32 all-reduce.

The shard is cut into chunks, each its own message, so that the arithmetic of one chunk runs while
another is on the wire. `fused` packs everything into one message instead: fewer, larger messages
for networks whose latency counts more than their bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_rl.comm.collectives import all_gather
from megatron_rl.kernels.int8_allreduce import Backend, message_bytes, message_views

CHUNK_VALUES = 1 << 22  # values of a gradient in one message: 4 MB of int8, 16 MB of fp32


@dataclass(slots=True)
class Segment:
    """One gradient to reduce, in place.

    Attributes:
        grad_NS: fp32 or bf16, last dim contiguous. After the reduction every row (shot 2) or only
            the own row (no shot 2) holds the sum over ranks.
        sent_residual_NS: error feedback of shot 1, fp32 or bf16, or None.
        owned_residual_S: error feedback of shot 2, or None.
    """

    grad_NS: torch.Tensor
    sent_residual_NS: torch.Tensor | None = None
    owned_residual_S: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """How a group reduces.

    Attributes:
        group: the ranks that sum.
        backend: kernels for the gradients' device.
        block: values per scale.
        gather: run shot 2.
        factor: the sum is multiplied by this (1/N averages).
        fused: one message for everything.
        stochastic: stochastic rounding instead of half to even.
        chunk: values of a gradient per message, over all rows.
    """

    group: dist.ProcessGroup
    backend: Backend
    block: int
    gather: bool
    factor: float = 1.0
    fused: bool = False
    stochastic: bool = False
    chunk: int = CHUNK_VALUES


@dataclass(slots=True)
class _Piece:
    """Columns [first, last) of a segment at byte ``offset`` of a message."""

    segment: Segment
    first: int
    last: int
    offset: int

    def views(self, message_NM: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = message_bytes(self.last - self.first, block)
        part_NM = message_NM[:, self.offset : self.offset + size]
        return message_views(part_NM, self.last - self.first, block)

    def columns(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[..., self.first : self.last]


@dataclass(slots=True)
class _Message:
    pieces: list[_Piece] = field(default_factory=list)
    size: int = 0
    index: int = 0
    received_NM: torch.Tensor | None = None
    work: dist.Work | None = None
    sent: torch.Tensor | None = None  # kept alive while it is on the wire

    def add(self, segment: Segment, first: int, last: int, block: int) -> None:
        self.pieces.append(_Piece(segment, first, last, self.size))
        self.size += message_bytes(last - first, block)


def shard_length(numel: int, ranks: int, block: int) -> int:
    """Length of equal shards of whole blocks; ``numel - ranks * shard_length`` values are left."""
    return numel // (ranks * block) * block


def noise_seed(*parts: int) -> int:
    """32-bit seed from integers such as (step, rank, message): unrelated for close arguments."""
    h = 0x811C9DC5
    for part in parts:
        h = (h ^ part) * 0x9E3779B1 & 0xFFFFFFFF
        h ^= h >> 15
        h = h * 0x85EBCA6B & 0xFFFFFFFF
        h ^= h >> 13
    return h


class TwoShot:
    """One reduction in flight: `launch` sends shot 1, `finish` completes it.

    All ranks of the group must build it from segments of equal shapes and call in equal order.

    Args:
        segments: the gradients.
        rules: group, kernels and options.
        step: a number that differs between reductions, for stochastic rounding.
    """

    def __init__(self, segments: Sequence[Segment], rules: Rules, step: int = 0) -> None:
        self._rules, self._step = rules, step
        self._ranks, self._rank = rules.group.size(), rules.group.rank()
        self._messages = self._cut(segments)
        self.nonfinite_blocks: torch.Tensor | None = None

    def _cut(self, segments: Sequence[Segment]) -> list[_Message]:
        block = self._rules.block
        columns = max(block, self._rules.chunk // self._ranks // block * block)
        fused = _Message()
        messages = []
        for segment in segments:
            shard = segment.grad_NS.shape[1]
            if self._rules.fused:
                fused.add(segment, 0, shard, block)
                continue
            pieces = math.ceil(shard / columns)
            width = math.ceil(shard / max(1, pieces) / block) * block
            for first in range(0, shard, max(1, width)):
                message = _Message()
                message.add(segment, first, min(first + width, shard), block)
                messages.append(message)
        if fused.pieces:
            messages = [fused]
        for index, message in enumerate(messages):
            message.index = index
        return messages

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank puts on the wire, all shots."""
        shots = 2 if self._rules.gather else 1
        return shots * (self._ranks - 1) * sum(message.size for message in self._messages)

    def _seed(self, shot: int, message: _Message, piece: int) -> int | None:
        if not self._rules.stochastic:
            return None
        return noise_seed(self._step, shot, self._rank, message.index, piece)

    def launch(self) -> None:
        """Quantise chunk after chunk; each goes on the wire while the next is worked on."""
        bad = []
        for message in self._messages:
            device = message.pieces[0].segment.grad_NS.device
            sent_NM = torch.empty(self._ranks, message.size, dtype=torch.uint8, device=device)
            for index, piece in enumerate(message.pieces):
                q_NC, scale_NK = piece.views(sent_NM, self._rules.block)
                self._rules.backend.quantize(
                    piece.columns(piece.segment.grad_NS), q_NC, scale_NK, self._rules.block,
                    piece.columns(piece.segment.sent_residual_NS), self._seed(1, message, index),
                )  # fmt: skip
                bad.append(scale_NK.isnan().sum())
            message.sent, message.received_NM = sent_NM, torch.empty_like(sent_NM)
            message.work = dist.all_to_all_single(
                message.received_NM, sent_NM, group=self._rules.group, async_op=True
            )
        if bad:
            self.nonfinite_blocks = torch.stack(bad).sum()

    def finish(self) -> None:
        """Sum what arrived; with shot 2, pass the sums on and write what all owners sent."""
        for message in self._messages:
            message.work.wait()
            if self._rules.gather:
                self._send_sums(message)
            else:
                self._keep_sums(message)
        if not self._rules.gather:
            return
        for message in self._messages:
            message.work.wait()
            for piece in message.pieces:
                q_NC, scale_NK = piece.views(message.received_NM, self._rules.block)
                grad_NC = piece.columns(piece.segment.grad_NS)
                self._rules.backend.dequantize(q_NC, scale_NK, self._rules.block, grad_NC)
            message.received_NM = message.sent = None

    def _keep_sums(self, message: _Message) -> None:
        for piece in message.pieces:
            q_NC, scale_NK = piece.views(message.received_NM, self._rules.block)
            own_C = piece.columns(piece.segment.grad_NS)[self._rank]
            self._rules.backend.reduce(
                q_NC, scale_NK, self._rules.block, out_C=own_C, factor=self._rules.factor
            )
        message.received_NM = message.sent = None

    def _send_sums(self, message: _Message) -> None:
        sums_1M = torch.empty(1, message.size, dtype=torch.uint8, device=message.sent.device)
        for index, piece in enumerate(message.pieces):
            q_NC, scale_NK = piece.views(message.received_NM, self._rules.block)
            q_1C, scale_1K = piece.views(sums_1M, self._rules.block)
            self._rules.backend.reduce(
                q_NC, scale_NK, self._rules.block, q_C=q_1C[0], scale_K=scale_1K[0],
                residual_C=piece.columns(piece.segment.owned_residual_S),
                factor=self._rules.factor, seed=self._seed(2, message, index),
            )  # fmt: skip
        # The buffer of shot 1 has been read and is large enough for shot 2.
        message.sent = sums_1M
        message.work = all_gather(message.received_NM, sums_1M, self._rules.group, async_op=True)
