"""Plans run on gloo ranks: bytes that cross, bytes that land, memory that is held."""

import gc

import pytest
import torch
import torch.distributed as dist

from megatron_rl.resharding.arena import Arena
from megatron_rl.resharding.decoder import DecoderSizes, decoder_specs
from megatron_rl.resharding.execute import Resharder, check_shards, new_exchange_group
from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.plan import make_plan
from megatron_rl.resharding.specs import TensorSpec
from megatron_rl.resharding.volumes import micro_dp_bytes


def sizes_of(kind: str, layers: int = 4) -> DecoderSizes:
    """Small models: "plain" has whole KV groups, "gqa" fewer KV heads than ranks, a tie, biases."""
    if kind == "plain":
        return DecoderSizes(
            layers=layers, hidden=32, ffn=64, heads=8, kv_heads=8, head_dim=4, vocab=64,
            dtype="float32",
        )  # fmt: skip
    return DecoderSizes(
        layers=layers, hidden=40, ffn=48, heads=8, kv_heads=2, head_dim=6, vocab=24,
        tied=True, qkv_bias=True, qk_norm=True,
    )  # fmt: skip


def whole_tensors(specs: tuple[TensorSpec, ...], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in specs
    }


def cut_from(specs, wholes, grid: ShardGrid, rank: int) -> dict[str, torch.Tensor]:
    """The shards of a rank, gathered entry by entry from the whole tensors."""
    layers = 1 + max(s.layer for s in specs if s.layer is not None)
    at = grid.coordinate(rank)
    shards = {}
    for s in specs:
        if at.pp in s.stages(grid.pp, grid.layer_stages(layers)):
            entries = [
                entry
                for start, length in s.intervals(grid.tp, at.tp, grid.replicate_kv)
                for entry in range(start, start + length)
            ]
            shards[s.name] = wholes[s.name].index_select(s.cut.axis, torch.tensor(entries))
    return shards


class WireCounter:
    """Counts the bytes that torch.distributed is asked to receive, apart from our own counting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received, self.calls = 0, 0
        batch, gather = dist.batch_isend_irecv, dist.all_gather_into_tensor

        def counted_batch(operations):
            self.calls += 1
            self.received += sum(o.tensor.nbytes for o in operations if o.op is dist.irecv)
            return batch(operations)

        def counted_gather(output, own, *args, **kwargs):
            self.calls += 1
            self.received += output.nbytes - own.nbytes
            return gather(output, own, *args, **kwargs)

        monkeypatch.setattr(dist, "batch_isend_irecv", counted_batch)
        monkeypatch.setattr(dist, "all_gather_into_tensor", counted_gather)


def run_layout(rank, world_size, specs, train, t_g, p_g, bucket_bytes, keep, copy_kv):
    """Gather, train a step, gather again, release, gather; returns measured figures."""
    gen = generation_grid(
        train, tp=t_g, pp=p_g, replicate_kv=copy_kv,
        num_layers=1 + max(s.layer for s in specs if s.layer is not None),
    )  # fmt: skip
    data = train.axes(rank)[1]
    plan = make_plan(specs, train, gen, replica=data, bucket_bytes=bucket_bytes)
    group = new_exchange_group(plan)
    weights = cut_from(specs, whole_tensors(specs, 0), train, rank)
    resharder = Resharder(plan, rank, weights, group, keep=keep)
    with pytest.MonkeyPatch.context() as patch:
        wire = WireCounter(patch)
        gathered = resharder.gather()
    addresses = {name: tensor.data_ptr() for name, tensor in gathered.items()}
    held = (resharder.extra_bytes, resharder.staging_bytes)
    for seed in (1, 2):
        for name, value in cut_from(specs, whole_tensors(specs, seed), train, rank).items():
            weights[name].copy_(value)
        resharder.release()
        assert (resharder.extra_bytes == 0) == (not keep or held[0] == 0)
        again = resharder.gather()
        for name, value in cut_from(specs, whole_tensors(specs, seed), gen, rank).items():
            assert torch.equal(again[name], value), (seed, name)
        assert again.keys() == gathered.keys()
        assert all(again[name] is gathered[name] for name in again)
        if keep:
            assert {name: tensor.data_ptr() for name, tensor in again.items()} == addresses
    in_place = {n for n, t in gathered.items() if n in weights and t is weights[n]}
    assert in_place == {specs[i].name for i in plan.unchanged(rank)}
    assert resharder.traffic.received_bytes == 3 * wire.received
    return {
        "received": wire.received,
        "planned": plan.received_bytes(rank),
        "calls": wire.calls,
        "buckets": plan.num_buckets,
        "extra": held[0],
        "staging": held[1],
        "generation": plan.generation_bytes(rank),
    }


LAYOUTS = [
    (2, ShardGrid(tp=2), 1, 1, "plain"),
    (2, ShardGrid(pp=2, vpp=2), 1, 1, "plain"),
    (4, ShardGrid(tp=4), 2, 1, "gqa"),
    (4, ShardGrid(tp=2, pp=2), 1, 1, "gqa"),
    (4, ShardGrid(tp=2, dp=2), 1, 1, "gqa"),
    (4, ShardGrid(pp=4, layer_split=(1, 2, 0, 1)), 1, 2, "gqa"),
    (8, ShardGrid(tp=8), 2, 1, "plain"),
    (8, ShardGrid(tp=4, pp=2), 2, 1, "gqa"),
    (8, ShardGrid(tp=2, pp=2, vpp=2, dp=2), 1, 2, "gqa"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "train", "t_g", "p_g", "kind"), LAYOUTS)
@pytest.mark.parametrize("keep", [True, False])
def test_layouts_gather_bitwise_and_to_the_byte(ranks, world, train, t_g, p_g, kind, keep):
    """Every rank ends with the slices of the whole tensors; the wire carried the planned bytes."""
    specs = decoder_specs(sizes_of(kind))
    results = ranks(world, run_layout, specs, train, t_g, p_g, 3000, keep, None)
    for figures in results:
        assert figures["received"] == figures["planned"]
        assert figures["calls"] <= figures["buckets"]
        # Two slots, each at most a bucket in and two payloads out, and alignment per peer.
        assert figures["staging"] <= 2 * 3 * (3000 + 256 * world)
        # Alignment of the arena aside, no more than the generation shard is held.
        assert figures["extra"] <= figures["generation"] + 256 * len(specs)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("train", "t_g", "p_g"), [(ShardGrid(tp=4), 1, 1), (ShardGrid(4, 2), 2, 1)]
)
def test_published_volume_on_the_wire(ranks, train, t_g, p_g):
    """(tp - t_g p_g)/(t_g p_g tp) M bytes received by every rank, counted at torch.distributed."""
    specs = tuple(
        s
        for s in decoder_specs(sizes_of("plain"))
        if s.layer is not None and s.cut.kind != "replicated"
    )
    model_bytes = sum(s.nbytes for s in specs)
    results = ranks(train.world_size, run_layout, specs, train, t_g, p_g, 10**6, True, None)
    want = micro_dp_bytes(model_bytes, train.tp, train.pp, t_g, p_g)
    assert {figures["received"] for figures in results} == {want}
    assert {figures["calls"] for figures in results} == {1}, "one bucket, one collective"


@pytest.mark.ranks
def test_kv_heads_cut_in_training_copied_in_generation(ranks):
    """tp=4 with 2 KV heads: training cuts through groups, generation holds whole KV heads."""
    specs = decoder_specs(sizes_of("gqa"))
    ranks(4, run_layout, specs, ShardGrid(tp=4), 4, 1, 10**6, True, True)


@pytest.mark.ranks
def test_number_of_collectives_does_not_follow_the_number_of_tensors(ranks):
    """Twice the layers at half the width: the same bytes, the same collectives."""
    few = decoder_specs(sizes_of("plain", layers=2))
    many = decoder_specs(sizes_of("plain", layers=8))
    calls = [
        {f["calls"] for f in ranks(2, run_layout, s, ShardGrid(tp=2), 1, 1, 10**7, True, None)}
        for s in (few, many)
    ]
    assert calls == [{1}, {1}]


def run_round_trip(rank, world_size):
    """tp 4 -> 2 -> 4: nothing travels back, and the training shards return bit by bit."""
    specs, train = decoder_specs(sizes_of("gqa")), ShardGrid(tp=4)
    gen = generation_grid(train, tp=2)
    there = make_plan(specs, train, gen)
    weights = cut_from(specs, whole_tensors(specs, 5), train, rank)
    group = new_exchange_group(there)
    middle = Resharder(there, rank, weights, group).gather()
    back = make_plan(specs, gen, train)
    returned = Resharder(back, rank, middle, None)
    final = returned.gather()
    assert returned.traffic.received_bytes == 0
    assert all(torch.equal(final[name], weights[name]) for name in weights)
    return True


@pytest.mark.ranks
def test_round_trip_is_bitwise(ranks):
    assert all(ranks(4, run_round_trip))


def run_moved_weights(rank, world_size):
    """Training storage moves between two gathers, as after offloading: the copy follows it."""
    specs, train = decoder_specs(sizes_of("plain")), ShardGrid(tp=2)
    plan = make_plan(specs, train, generation_grid(train, tp=1))
    weights = cut_from(specs, whole_tensors(specs, 0), train, rank)
    resharder = Resharder(plan, rank, weights, new_exchange_group(plan))
    resharder.gather()
    moved = cut_from(specs, whole_tensors(specs, 7), train, rank)
    for name, tensor in weights.items():
        tensor.data = moved[name]
    gc.collect()
    gathered = resharder.gather()
    return all(torch.equal(gathered[n], w) for n, w in whole_tensors(specs, 7).items())


@pytest.mark.ranks
def test_weights_that_moved_are_read_where_they_are(ranks):
    assert all(ranks(2, run_moved_weights))


def test_released_memory_is_gone_and_use_raises():
    """Storage of size 0 while released; a layer that reads it raises, no stale numbers."""
    arena = Arena({"w": ((8, 8), torch.float32)}, torch.device("cpu"))
    weight = arena.tensors["w"].fill_(1.0)
    arena.release()
    assert arena.held_bytes == 0 and not arena.allocated
    with pytest.raises(RuntimeError, match="storage of size 0"):
        torch.nn.functional.linear(torch.ones(2, 8), weight)
    with pytest.raises(RuntimeError, match="storage of size 0"):
        torch.nn.functional.embedding(torch.tensor([1]), weight)
    arena.allocate()
    assert weight.fill_(2.0).sum() == 128


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("decoder.final_layernorm.weight"), "was not given"),
        (lambda w: w.update({"output_layer.weight": torch.zeros(3, 3)}), r"\(3, 3\)"),
        (lambda w: w.update({"output_layer.weight": w["output_layer.weight"].double()}), "float64"),
        (
            lambda w: w.update({"output_layer.weight": torch.zeros(32, 64).t()}),
            "not contiguous",
        ),
    ],
)
def test_shards_that_contradict_the_plan_are_refused(spoil, message):
    specs, grid = decoder_specs(sizes_of("plain")), ShardGrid()
    weights = cut_from(specs, whole_tensors(specs, 0), grid, 0)
    spoil(weights)
    with pytest.raises(ValueError, match=message):
        check_shards(make_plan(specs, grid, grid), 0, weights)
