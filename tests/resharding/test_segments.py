"""Generation weights as whole training shards: bits, bytes held, and layers computed over them."""

import pytest
import torch
from torch.nn import functional

from megatron_rl.resharding.decoder import DecoderSizes, decoder_specs
from megatron_rl.resharding.execute import new_exchange_group
from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.plan import make_plan
from megatron_rl.resharding.segments import (
    SegmentedResharder,
    column_linear,
    embedding_lookup,
    row_linear,
)

SIZES = DecoderSizes(
    layers=4, hidden=64, ffn=64, heads=8, kv_heads=4, head_dim=8, vocab=64, qkv_bias=True,
    dtype="float32",
)  # fmt: skip


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator) for s in decoder_specs(SIZES)}


def training_shards(train: ShardGrid, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Shards as Megatron-Core's layers cut them."""
    at, stages, shards = train.coordinate(rank), train.layer_stages(SIZES.layers), {}
    for spec, whole in zip(decoder_specs(SIZES), whole_tensors(seed).values(), strict=True):
        if at.pp not in spec.stages(train.pp, stages):
            continue
        if spec.cut.kind == "replicated":
            part = whole
        elif spec.cut.kind == "gate_up":
            part = torch.cat([half.chunk(train.tp)[at.tp] for half in whole.chunk(2)])
        else:
            part = whole.chunk(train.tp, dim=spec.cut.axis)[at.tp]
        shards[spec.name] = part.contiguous()
    return shards


def run_segments(rank, world_size, train, t_g, p_g):
    gen = generation_grid(train, tp=t_g, pp=p_g, num_layers=SIZES.layers)
    plan = make_plan(decoder_specs(SIZES), train, gen, replica=train.axes(rank)[1])
    weights = training_shards(train, rank, 0)
    resharder = SegmentedResharder(plan, rank, weights, new_exchange_group(plan), keep=False)
    resharder.gather()
    resharder.release()
    assert resharder.extra_bytes == 0
    for name, value in training_shards(train, rank, 1).items():
        weights[name].copy_(value)
    found = resharder.gather()
    # Ranks of one tensor rank's neighbourhood, in order: the shards a generation shard is made of.
    at, width = gen.coordinate(rank), train.tp // t_g
    whole = whole_tensors(1)
    for index, spec in enumerate(plan.specs):
        if plan.generation_shape(rank, index) is None:
            assert spec.name not in found
            continue
        segments = found[spec.name]
        if spec.cut.kind == "replicated":
            assert torch.equal(segments[0], whole[spec.name]) and len(segments) == 1
            continue
        line = train.layer_stages(SIZES.layers)
        stage = {"first": 0, "last": train.pp - 1}.get(spec.placement)
        stage = line[spec.layer] if stage is None else stage
        for member, segment in enumerate(segments):
            source = at.tp * width + member + train.tp * train.dp * stage
            assert torch.equal(segment, training_shards(train, source, 1)[spec.name])
    own = [n for n in weights if any(s is weights[n] for s in found.get(n, ()))]
    assert own == list(weights), "every training shard is used in place"
    return plan.received_bytes(rank), resharder.traffic.received_bytes, resharder.extra_bytes


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("train", "t_g", "p_g"),
    [(ShardGrid(tp=2), 1, 1), (ShardGrid(tp=4), 2, 1), (ShardGrid(tp=2, pp=2), 1, 1)],
)
def test_memory_is_exactly_what_was_received(ranks, train, t_g, p_g):
    """M/(t_g p_g) - M/(tp) beyond the training weights, alignment of each payload aside."""
    for planned, received, extra in ranks(train.world_size, run_segments, train, t_g, p_g):
        assert received == 2 * planned
        assert planned <= extra <= planned + 256 * train.world_size


def test_layers_over_segments_equal_layers_over_whole_weights():
    """Attention and gated MLP, embedding: segmented against the joined matrices."""
    torch.set_default_dtype(torch.float64)
    try:
        x, hidden, ffn = torch.randn(7, 12), 12, 20
        gate, up, down = (
            torch.randn(ffn, hidden),
            torch.randn(ffn, hidden),
            torch.randn(hidden, ffn),
        )
        fc1 = tuple(torch.cat([g, u]) for g, u in zip(gate.chunk(4), up.chunk(4), strict=True))
        inner = column_linear(x, fc1, gated=True)
        assert torch.allclose(inner, functional.linear(x, torch.cat([gate, up])))
        g, u = inner.chunk(2, dim=-1)
        out = row_linear(functional.silu(g) * u, down.chunk(4, dim=1))
        assert torch.allclose(
            out, functional.linear(functional.silu(x @ gate.T) * (x @ up.T), down)
        )
        qkv, bias = torch.randn(24, hidden), torch.randn(24)
        assert torch.allclose(
            column_linear(x, qkv.chunk(3), bias.chunk(3)), functional.linear(x, qkv, bias)
        )
        ids, table = torch.randint(0, 32, (2, 9)), torch.randn(32, hidden)
        assert torch.equal(embedding_lookup(ids, table.chunk(4)), table[ids])
    finally:
        torch.set_default_dtype(torch.float32)


def test_shards_cut_by_buckets_or_copied_heads_are_refused():
    """What cannot be used as whole shards is named, with the way out."""
    specs, train = decoder_specs(SIZES), ShardGrid(tp=2)
    weights = training_shards(train, 0, 0)
    plan = make_plan(specs, train, generation_grid(train, tp=1), bucket_bytes=1024)
    with pytest.raises(ValueError, match="bucket_bytes"):
        SegmentedResharder(plan, 0, weights, None)
    wide = ShardGrid(tp=8)
    copied = make_plan(specs, wide, generation_grid(wide, tp=8, replicate_kv=True))
    with pytest.raises(ValueError, match="replicate_kv|one piece"):
        SegmentedResharder(copied, 0, training_shards(wide, 0, 0), None)
