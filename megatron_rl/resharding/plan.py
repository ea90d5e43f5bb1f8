"""From two layouts to a list of copies, without communication.

`make_plan` answers, for every rank of one training replica: which bytes of which tensor does it
need for generation, does it hold them already, and if not, which rank sends them and where do they
land. The answer is plain data (frozen dataclasses of numbers, JSON in and out), so that volumes
can be asserted to the byte for 512 ranks on a laptop and the same list can drive gloo, NCCL or a
simulation.

Ranks of different training replicas hold equal weights and never exchange any: one plan covers one
replica, and the plan of replica d is that of replica 0 with d·tp added to every rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod

from megatron_rl.resharding.buckets import LOCAL, Block, BucketFiller, Transfer
from megatron_rl.resharding.grid import ShardGrid
from megatron_rl.resharding.specs import Cut, Interval, TensorSpec

DEFAULT_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Plan:
    """Every copy that turns the training shards of one replica into its generation shards.

    `transfers` is in sending order; copies with `bucket == LOCAL` stay on their rank. No rank
    receives more than `bucket_bytes` in one bucket, and the number of buckets depends on bytes
    alone, not on the number of tensors.
    """

    specs: tuple[TensorSpec, ...]
    train: ShardGrid
    gen: ShardGrid
    replica: int
    bucket_bytes: int
    num_buckets: int
    transfers: tuple[Transfer, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.train.block(self.replica)

    @cached_property
    def num_layers(self) -> int:
        return count_layers(self.specs)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[list[Transfer], list[Transfer], list[Transfer]]]:
        table = {rank: ([], [], []) for rank in self.ranks}
        for transfer in self.transfers:
            if transfer.bucket == LOCAL:
                table[transfer.dst][0].append(transfer)
            else:
                table[transfer.dst][1].append(transfer)
                table[transfer.src][2].append(transfer)
        return table

    def local(self, rank: int) -> Sequence[Transfer]:
        """Copies from the rank's training shards into its own generation shards."""
        return self._by_rank[rank][0]

    def receives(self, rank: int) -> Sequence[Transfer]:
        return self._by_rank[rank][1]

    def sends(self, rank: int) -> Sequence[Transfer]:
        return self._by_rank[rank][2]

    def received_bytes(self, rank: int) -> int:
        return sum(t.block.nbytes for t in self.receives(rank))

    def sent_bytes(self, rank: int) -> int:
        return sum(t.block.nbytes for t in self.sends(rank))

    def training_shape(self, rank: int, tensor: int) -> tuple[int, ...] | None:
        """Shape of a rank's training shard; None when the rank's stage does not hold it."""
        return shard_shape(self.specs[tensor], self.train, rank, self.num_layers)

    def generation_shape(self, rank: int, tensor: int) -> tuple[int, ...] | None:
        """Shape of a rank's generation shard; None when the rank's stage does not hold it."""
        return shard_shape(self.specs[tensor], self.gen, rank, self.num_layers)

    def training_bytes(self, rank: int) -> int:
        return self._shard_bytes(self.train, rank)

    def generation_bytes(self, rank: int) -> int:
        return self._shard_bytes(self.gen, rank)

    def _shard_bytes(self, grid: ShardGrid, rank: int) -> int:
        shapes = ((s, shard_shape(s, grid, rank, self.num_layers)) for s in self.specs)
        return sum(prod(shape) * s.element_bytes for s, shape in shapes if shape is not None)

    def unchanged(self, rank: int) -> frozenset[int]:
        """Tensors whose generation shard is the rank's training shard: used in place."""
        return frozenset(
            tensor
            for tensor, spec in enumerate(self.specs)
            if (held := _held(spec, self.train, rank, self.num_layers)) is not None
            and held == _held(spec, self.gen, rank, self.num_layers)
        )

    def exchange_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that exchange bytes with one another, for every training replica, rising.

        With zero-redundancy grouping these are the micro-DP groups. Ranks that neither send nor
        receive are in no group. Grids whose axes differ in width need not repeat from replica to
        replica; each replica is then one group.
        """
        grids = [(g.tp_width, g.dp, g.pp_width) for g in (self.train, self.gen)]
        if grids[0] != grids[1]:
            return tuple(self.train.block(data) for data in range(self.train.dp))
        parent = {rank: rank for rank in self.ranks}

        def root(rank: int) -> int:
            while parent[rank] != rank:
                parent[rank] = parent[parent[rank]]
                rank = parent[rank]
            return rank

        for transfer in self.transfers:
            parent[root(transfer.src)] = root(transfer.dst)
        members: dict[int, list[int]] = {}
        for rank in self.ranks:
            members.setdefault(root(rank), []).append(rank)
        groups = [group for group in members.values() if len(group) > 1]
        shift = self.train.tp_width
        return tuple(
            tuple(rank + (data - self.replica) * shift for rank in group)
            for data in range(self.train.dp)
            for group in groups
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        grids = {}
        for side in ("train", "gen"):
            split = data[side].pop("layer_split")
            grids[side] = ShardGrid(**data[side], layer_split=tuple(split) if split else None)
        specs = tuple(
            TensorSpec(**{**s, "shape": tuple(s["shape"]), "cut": Cut(**s["cut"])})
            for s in data.pop("specs")
        )
        transfers = tuple(
            Transfer(**{**t, "block": Block(**t["block"])}) for t in data.pop("transfers")
        )
        return Plan(**{**data, **grids, "specs": specs, "transfers": transfers})


def count_layers(specs: Sequence[TensorSpec]) -> int:
    return 1 + max((s.layer for s in specs if s.layer is not None), default=-1)


def shard_shape(
    spec: TensorSpec, grid: ShardGrid, rank: int, num_layers: int
) -> tuple[int, ...] | None:
    """Shape of what `rank` holds of a tensor under a grid, None when its stage holds none."""
    at = grid.coordinate(rank)
    if at.pp not in spec.stages(grid.pp, grid.layer_stages(num_layers)):
        return None
    return spec.shard_shape(grid.tp, at.tp, grid.replicate_kv)


def _held(
    spec: TensorSpec, grid: ShardGrid, rank: int, num_layers: int
) -> tuple[Interval, ...] | None:
    at = grid.coordinate(rank)
    if at.pp not in spec.stages(grid.pp, grid.layer_stages(num_layers)):
        return None
    return spec.intervals(grid.tp, at.tp, grid.replicate_kv)


def make_plan(
    specs: Sequence[TensorSpec],
    train: ShardGrid,
    gen: ShardGrid,
    *,
    replica: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Plan:
    """Plan the change from one layout to another.

    Args:
        specs: every tensor of the model, in sending order; the same on every rank.
        train: where the weights are. Either grid may be any layout of the same ranks; bytes are
            fewest when `gen` comes from `generation_grid(train, ...)`.
        gen: where they are needed.
        replica: position on `train`'s data axis; its ranks alone take part.
        bucket_bytes: most bytes that a rank receives in one bucket.

    Raises:
        ValueError: grids of different size, a tensor that a grid cannot cut (named), duplicate
            names, or a bucket smaller than a row of some tensor.
    """
    if train.world_size != gen.world_size:
        raise ValueError(
            f"the training grid has {train.world_size} ranks, the generation grid "
            f"{gen.world_size}: both lay out the same ranks"
        )
    names = [s.name for s in specs]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"tensor names must differ; repeated: {twice}")
    layers = count_layers(specs)
    train_stages, gen_stages = train.layer_stages(layers), gen.layer_stages(layers)
    ranks = train.block(replica)
    by_stage: dict[int, list[int]] = {}
    for rank in ranks:
        by_stage.setdefault(train.coordinate(rank).pp, []).append(rank)
    cache: dict[tuple, tuple[tuple[int, Block], ...]] = {}
    transfers: list[Transfer] = []
    filler = BucketFiller(bucket_bytes)
    for index, spec in enumerate(specs):
        sources = spec.stages(train.pp, train_stages)
        targets = spec.stages(gen.pp, gen_stages)
        holders = [rank for stage in sources for rank in by_stage[stage]]
        remote: list[Transfer] = []
        for dst in ranks:
            if gen.coordinate(dst).pp not in targets:
                continue
            # Layers of one stage move alike, so their pieces are computed once.
            key = (spec.cut, spec.shape, spec.dtype, sources, dst)
            if key not in cache:
                cache[key] = tuple(_pieces(spec, dst, holders, train, gen))
            for src, block in cache[key]:
                kept = transfers if src == dst else remote
                kept.append(Transfer(index, src, dst, LOCAL, block))
        transfers.extend(filler.add(spec.name, remote))
    return Plan(
        tuple(specs), train, gen, replica, bucket_bytes, filler.num_buckets, tuple(transfers)
    )


def _pieces(
    spec: TensorSpec, dst: int, holders: Sequence[int], train: ShardGrid, gen: ShardGrid
) -> list[tuple[int, Block]]:
    """(source rank, block) covering what `dst` needs of a tensor, own bytes first."""
    wanted, offset = [], 0
    for interval in spec.intervals(gen.tp, gen.coordinate(dst).tp, gen.replicate_kv):
        wanted.append((interval, offset))
        offset += interval.length
    dst_width = offset
    across, _, down = train.axes(dst)

    def preference(src: int) -> tuple:
        # A rank's own shard costs nothing; of equal copies the next neighbour's is taken, so that
        # the load spreads instead of falling on the lowest rank.
        src_across, _, src_down = train.axes(src)
        return (src != dst, (src_across - across) % train.tp_width, abs(src_down - down), src)

    found: list[tuple[int, Block]] = []
    for src in sorted(holders, key=preference):
        if not wanted:
            break
        src_offset, runs = 0, []
        held = spec.intervals(train.tp, train.coordinate(src).tp, train.replicate_kv)
        for interval in held:
            wanted, cut_runs = _take(wanted, interval, src_offset)
            runs.extend(cut_runs)
            src_offset += interval.length
        found.extend((src, block) for block in _blocks(spec, runs, src_offset, dst_width))
    assert not wanted, f"{spec.name}: rank {dst} misses {wanted}, which no rank of the replica has"
    return found


def _take(
    wanted: list[tuple[Interval, int]], have: Interval, src_offset: int
) -> tuple[list[tuple[Interval, int]], list[tuple[int, int, int]]]:
    """Split wanted intervals by one held interval: (still wanted, [(src, dst, length)] runs)."""
    left, runs = [], []
    for want, dst_offset in wanted:
        start = max(want.start, have.start)
        stop = min(want.start + want.length, have.start + have.length)
        if start >= stop:
            left.append((want, dst_offset))
            continue
        runs.append(
            (src_offset + start - have.start, dst_offset + start - want.start, stop - start)
        )
        if want.start < start:
            left.append((Interval(want.start, start - want.start), dst_offset))
        if stop < want.start + want.length:
            rest = Interval(stop, want.start + want.length - stop)
            left.append((rest, dst_offset + stop - want.start))
    return left, runs


def _blocks(
    spec: TensorSpec, runs: list[tuple[int, int, int]], src_width: int, dst_width: int
) -> list[Block]:
    """Runs along the cut axis as byte blocks; neighbours on both sides are joined."""
    joined: list[tuple[int, int, int]] = []
    for src, dst, length in sorted(runs):
        if joined and joined[-1][0] + joined[-1][2] == src and joined[-1][1] + joined[-1][2] == dst:
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + length)
        else:
            joined.append((src, dst, length))
    axis = spec.cut.axis
    rows = prod(spec.shape[:axis])
    inner = prod(spec.shape[axis + 1 :]) * spec.element_bytes
    blocks = []
    for src, dst, length in joined:
        block = Block(
            src * inner, dst * inner, rows, length * inner, src_width * inner, dst_width * inner
        )
        if rows == 1 or (block.row_bytes == block.src_stride == block.dst_stride):
            total = block.nbytes
            block = replace(block, rows=1, row_bytes=total, src_stride=total, dst_stride=total)
        blocks.append(block)
    return blocks
