"""What one rank sends and receives in one bucket, and how it goes over the wire.

Blocks for one peer are packed one after the other into a *payload*; equal payloads for several
peers are packed once. Two transports, chosen per bucket from the plan alone so that every rank
chooses the same:

  all-gather    every rank of the group sends one payload, the same to all, of equal size: the
                micro-DP case. One collective. Two ranks have nothing to gain from it (H200 over
                NVLink: 275 GB/s, where sending and receiving reaches 304).
  send/receive  anything else (pipeline stages of unequal size, replicated tensors of another
                stage): one batch of point-to-point operations, exactly the planned bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.kernels.reshard import BlockCopy
from megatron_rl.resharding.arena import align
from megatron_rl.resharding.buckets import Block, Transfer
from megatron_rl.resharding.plan import Plan

VECTOR = 16


@dataclass
class Traffic:
    """Bytes that this rank really handed to and got from collectives, and how many it joined."""

    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: int = 0


@dataclass(frozen=True)
class Payload:
    """Packed blocks in a staging buffer: where they start and the transfers they stem from."""

    offset: int
    nbytes: int
    transfers: tuple[Transfer, ...]

    def positions(self) -> list[tuple[Transfer, int]]:
        """(transfer, byte position in the staging buffer) of every block."""
        placed, position = [], self.offset
        for transfer in self.transfers:
            placed.append((transfer, position))
            position += transfer.block.nbytes
        return placed


@dataclass(frozen=True)
class Exchange:
    """One rank's part in one bucket.

    Args:
        sends: payload of every peer that gets one; equal payloads share an offset.
        receives: payload of every peer that sends one.
        gathered: payload bytes if the bucket is an all-gather, else None.
        send_bytes, receive_bytes: staging needed.
    """

    sends: dict[int, Payload]
    receives: dict[int, Payload]
    gathered: int | None
    send_bytes: int
    receive_bytes: int

    def distinct_sends(self) -> list[Payload]:
        return list({p.offset: p for p in self.sends.values()}.values())


def build_exchanges(
    plan: Plan, rank: int, group: Sequence[int], *, collective: bool = True
) -> list[Exchange]:
    """A rank's exchanges, one for each bucket of the plan.

    Args:
        plan: the plan of the rank's replica.
        rank: global rank.
        group: the ranks of its exchange group, rising.
        collective: use an all-gather where one fits. It needs room for the rank's own payload
            among those received; send/receive does not.
    """
    outgoing: dict[tuple[int, int], dict[int, list[Transfer]]] = {}
    incoming: dict[tuple[int, int], dict[int, list[Transfer]]] = {}
    for member in group:
        for transfer in plan.sends(member):
            by_peer = outgoing.setdefault((transfer.bucket, member), {})
            by_peer.setdefault(transfer.dst, []).append(transfer)
    for transfer in plan.receives(rank):
        by_peer = incoming.setdefault((transfer.bucket, rank), {})
        by_peer.setdefault(transfer.src, []).append(transfer)
    exchanges = []
    for bucket in range(plan.num_buckets):
        sent = [outgoing.get((bucket, member), {}) for member in group]
        gathered = _gather_bytes(sent, len(group)) if collective and len(group) > 2 else None
        sends, send_bytes = _lay_out_sends(outgoing.get((bucket, rank), {}))
        receives, receive_bytes = _lay_out_receives(
            incoming.get((bucket, rank), {}), group if gathered else None, gathered or 0
        )
        exchanges.append(Exchange(sends, receives, gathered, send_bytes, receive_bytes))
    return exchanges


def _packed(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
    # Odd sizes go last, so that they do not push the others off their 16-byte alignment.
    return tuple(sorted(transfers, key=lambda t: t.block.nbytes % VECTOR != 0))


def _source(transfer: Transfer) -> tuple[int, int, int, int, int]:
    b: Block = transfer.block
    return (transfer.tensor, b.src_offset, b.rows, b.row_bytes, b.src_stride)


def _gather_bytes(sent: Sequence[dict[int, list[Transfer]]], size: int) -> int | None:
    """Payload bytes when every rank sends one equal-sized payload to all others, else None."""
    sizes = set()
    for by_peer in sent:
        if len(by_peer) != size - 1:
            return None
        payloads = {tuple(map(_source, _packed(transfers))) for transfers in by_peer.values()}
        if len(payloads) != 1:
            return None
        sizes.add(sum(t.block.nbytes for t in next(iter(by_peer.values()))))
    return sizes.pop() if len(sizes) == 1 else None


def _lay_out_sends(by_peer: dict[int, list[Transfer]]) -> tuple[dict[int, Payload], int]:
    placed: dict[tuple, int] = {}
    sends, end = {}, 0
    for peer, transfers in sorted(by_peer.items()):
        packed = _packed(transfers)
        nbytes = sum(t.block.nbytes for t in packed)
        key = tuple(map(_source, packed))
        if key not in placed:
            placed[key] = end
            end += align(nbytes)
        sends[peer] = Payload(placed[key], nbytes, packed)
    return sends, end


def _lay_out_receives(
    by_peer: dict[int, list[Transfer]], group: Sequence[int] | None, slot: int
) -> tuple[dict[int, Payload], int]:
    """Payloads in rank order; an all-gather fixes equal slots, this rank's own among them."""
    receives, end = {}, 0
    for peer, transfers in sorted(by_peer.items()):
        packed = _packed(transfers)
        nbytes = sum(t.block.nbytes for t in packed)
        offset = group.index(peer) * slot if group is not None else end
        receives[peer] = Payload(offset, nbytes, packed)
        end = offset + align(nbytes)
    return receives, len(group) * slot if group is not None else end


def pack_copy(
    weight: torch.Tensor, buffer: torch.Tensor, transfer: Transfer, position: int
) -> BlockCopy:
    """The copy of one block from a training shard to its place in a payload."""
    b = transfer.block
    return BlockCopy(
        weight, buffer, b.src_offset, position, b.rows, b.row_bytes, b.src_stride, b.row_bytes
    )


def unpack_copy(
    buffer: torch.Tensor, weight: torch.Tensor, transfer: Transfer, position: int
) -> BlockCopy:
    """The copy of one block from a payload to its place in a generation shard."""
    b = transfer.block
    return BlockCopy(
        buffer, weight, position, b.dst_offset, b.rows, b.row_bytes, b.row_bytes, b.dst_stride
    )


def start_exchange(
    exchange: Exchange,
    send_buffer: torch.Tensor,
    receive_buffer: torch.Tensor,
    group: dist.ProcessGroup,
    traffic: Traffic,
) -> list[dist.Work]:
    """Begin one exchange; the caller waits for the returned work before it unpacks.

    Args:
        exchange: this rank's part.
        send_buffer: in, uint8, packed payloads.
        receive_buffer: out, uint8, at least `exchange.receive_bytes`.
        group: the exchange group.
        traffic: counts what is handed over.
    """
    if not exchange.sends and not exchange.receives:
        return []
    traffic.exchanges += 1
    if exchange.gathered is not None:
        own = send_buffer[: exchange.gathered]
        everyone = receive_buffer[: exchange.receive_bytes]
        traffic.sent_bytes += own.nbytes * len(exchange.sends)
        traffic.received_bytes += everyone.nbytes - own.nbytes
        return [dist.all_gather_into_tensor(everyone, own, group=group, async_op=True)]
    operations = []
    for peer, payload in exchange.sends.items():
        piece = send_buffer[payload.offset : payload.offset + payload.nbytes]
        traffic.sent_bytes += piece.nbytes
        operations.append(dist.P2POp(dist.isend, piece, peer, group))
    for peer, payload in exchange.receives.items():
        piece = receive_buffer[payload.offset : payload.offset + payload.nbytes]
        traffic.received_bytes += piece.nbytes
        operations.append(dist.P2POp(dist.irecv, piece, peer, group))
    return dist.batch_isend_irecv(operations)
