"""Resharding plans as pure data: simulated in memory against direct slicing of whole tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.resharding.buckets import LOCAL
from megatron_rl.resharding.decoder import DecoderSizes, cut_of, decoder_specs
from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.plan import Plan, make_plan
from megatron_rl.resharding.specs import Cut, TensorSpec
from megatron_rl.resharding.volumes import micro_dp_bytes

EVEN = [(2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (2, 4), (1, 8), (8, 8)]


def cut_slice(spec: TensorSpec, whole: torch.Tensor, tp: int, rank: int, copy_kv: bool):
    """A shard by slicing the whole tensor as Megatron-Core's layers do; no interval arithmetic."""
    kind = spec.cut.kind
    if kind == "replicated":
        return whole
    if kind == "columns":
        return whole.chunk(tp, dim=1)[rank]
    if kind == "gate_up":
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
    if kind == "qkv" and spec.cut.kv_heads < tp and copy_kv:
        per_group = spec.cut.heads // spec.cut.kv_heads
        heads = whole.chunk(spec.cut.heads + 2 * spec.cut.kv_heads)
        mine = range(rank * spec.cut.heads // tp, (rank + 1) * spec.cut.heads // tp)
        group = mine[0] // per_group
        start = group * (per_group + 2)
        queries = [heads[start + head - group * per_group] for head in mine]
        return torch.cat([*queries, heads[start + per_group], heads[start + per_group + 1]])
    return whole.chunk(tp)[rank]


def grid_shards(specs, wholes, grid: ShardGrid, rank: int) -> dict[str, torch.Tensor]:
    layers = 1 + max(s.layer for s in specs if s.layer is not None)
    at, stages = grid.coordinate(rank), grid.layer_stages(layers)
    return {
        s.name: cut_slice(s, wholes[s.name], grid.tp, at.tp, grid.replicate_kv).contiguous()
        for s in specs
        if at.pp in s.stages(grid.pp, stages)
    }


def simulate(plan: Plan, held: dict[int, dict[str, torch.Tensor]], targets) -> None:
    """Apply every transfer to the bytes of in-memory shards."""
    for t in plan.transfers:
        name, b = plan.specs[t.tensor].name, t.block
        src = held[t.src][name].view(-1).view(torch.uint8)
        dst = targets[t.dst][name].view(-1).view(torch.uint8)
        shape = (b.rows, b.row_bytes)
        dst.as_strided(shape, (b.dst_stride, 1), dst.storage_offset() + b.dst_offset).copy_(
            src.as_strided(shape, (b.src_stride, 1), src.storage_offset() + b.src_offset)
        )


def check_by_simulation(specs, train: ShardGrid, gen: ShardGrid, **kwargs) -> list[Plan]:
    wholes = {s.name: torch.randn(s.shape).to(getattr(torch, s.dtype)) for s in specs}
    plans = []
    for replica in range(train.dp):
        plan = make_plan(specs, train, gen, replica=replica, **kwargs)
        held = {r: grid_shards(specs, wholes, train, r) for r in plan.ranks}
        wanted = {r: grid_shards(specs, wholes, gen, r) for r in plan.ranks}
        targets = {
            r: {n: torch.full_like(w, torch.nan) for n, w in tensors.items()}
            for r, tensors in wanted.items()
        }
        simulate(plan, held, targets)
        for rank, tensors in wanted.items():
            for name, tensor in tensors.items():
                assert torch.equal(targets[rank][name], tensor), (rank, name)
            moved = plan.received_bytes(rank) + sum(t.block.nbytes for t in plan.local(rank))
            assert moved == plan.generation_bytes(rank), "a byte was written twice"
        plans.append(plan)
    return plans


@st.composite
def layouts(draw):
    """A small random decoder with a training grid and a generation grid that fit it."""
    tp, pp = draw(st.sampled_from([(2, 1), (4, 1), (2, 2), (1, 4), (4, 2), (3, 2)]))
    tp_g = draw(st.sampled_from([n for n in (1, 2, 3, 4) if tp % n == 0]))
    pp_g = draw(st.sampled_from([n for n in (1, 2, 4) if pp % n == 0]))
    vpp, layers = draw(st.sampled_from([(1, pp), (2, 2 * pp), (2, 4 * pp), (1, 3 * pp)]))
    split = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.integers(0, layers)) for _ in range(pp * vpp - 1))
        bounds = [0, *cuts, layers]
        split = tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    kv = draw(st.sampled_from([1, 3] if tp == 3 else [1, 2, 4, 8]))
    group = draw(st.sampled_from([1, 2])) * (1 if kv % tp == 0 else tp)
    dp = draw(st.sampled_from([1, 2]))
    sizes = DecoderSizes(
        layers=layers, hidden=tp * draw(st.integers(1, 3)), ffn=tp * draw(st.integers(1, 5)),
        heads=kv * group, kv_heads=kv, head_dim=draw(st.sampled_from([1, 2, 3])) * tp,
        vocab=tp * draw(st.integers(1, 7)), tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()), qk_norm=draw(st.booleans()), gated=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float64"])),
    )  # fmt: skip
    train = ShardGrid(
        tp, pp, vpp, dp, layer_split=split, replicate_kv=kv < tp and draw(st.booleans())
    )
    gen = generation_grid(
        train, tp=tp_g, pp=pp_g, num_layers=layers, replicate_kv=draw(st.booleans())
    )
    return decoder_specs(sizes), train, gen


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_any_layout_lands_every_byte(case):
    """GQA, padding, ties, biases, VPP, uneven splits: simulated plan == direct slicing."""
    check_by_simulation(*case)


@given(layouts())
@settings(max_examples=30, deadline=None)
def test_way_back_is_free_and_bitwise(case):
    """The training shard lies inside the generation shard, so returning moves no byte."""
    specs, train, gen = case
    if train.replicate_kv or gen.replicate_kv:
        gen = generation_grid(
            train, tp=gen.tp, pp=gen.pp, replicate_kv=train.replicate_kv,
            num_layers=1 + max(s.layer for s in specs if s.layer is not None),
        )  # fmt: skip
    for plan in check_by_simulation(specs, gen, train):
        assert all(t.bucket == LOCAL for t in plan.transfers)


def test_consecutive_grouping_is_planned_too_and_costs_more():
    """Neighbouring ranks as a generation group: right, but own shards are sent that need not be."""
    specs = cut_only_specs(layers=2)
    train = ShardGrid(tp=8)
    (near,) = check_by_simulation(specs, train, ShardGrid(tp=2, dp=4))
    (best,) = check_by_simulation(specs, train, generation_grid(train, tp=2))
    assert sum(map(near.received_bytes, near.ranks)) > sum(map(best.received_bytes, best.ranks))


def cut_only_specs(layers: int) -> tuple[TensorSpec, ...]:
    """A model of which every byte is cut and every stage is equal, as the formula assumes."""
    sizes = DecoderSizes(
        layers=layers, hidden=64, ffn=96, heads=16, kv_heads=8, head_dim=8, vocab=64
    )
    return tuple(
        s for s in decoder_specs(sizes) if s.layer is not None and s.cut.kind != "replicated"
    )


@pytest.mark.parametrize(("t", "p"), EVEN)
@pytest.mark.parametrize("d", [1, 8])
def test_received_volume_to_the_byte(t, p, d):
    """(tp - t_g p_g)/(t_g p_g tp) M on every one of up to 512 ranks, for every t_g | t, p_g | p."""
    specs, train = cut_only_specs(layers=8), ShardGrid(tp=t, pp=p, dp=d)
    model_bytes = sum(s.nbytes for s in specs)
    for t_g in [n for n in (1, 2, 4, 8) if t % n == 0]:
        for p_g in [n for n in (1, 2, 4, 8) if p % n == 0]:
            gen = generation_grid(train, tp=t_g, pp=p_g, num_layers=8)
            want = micro_dp_bytes(model_bytes, t, p, t_g, p_g)
            plan = make_plan(specs, train, gen, replica=d - 1)
            assert {plan.received_bytes(r) for r in plan.ranks} == {want}
            assert {plan.sent_bytes(r) for r in plan.ranks} == {want}
            assert {plan.generation_bytes(r) for r in plan.ranks} == {model_bytes // (t_g * p_g)}


def test_exchange_stays_in_the_micro_dp_groups():
    """Stride t/t_g and p/p_g: t=4, p=2 -> t_g=2, p_g=1 pairs tensor neighbours of all stages."""
    train = ShardGrid(tp=4, pp=2, dp=2)
    gen = generation_grid(train, tp=2, num_layers=2)
    plan = make_plan(cut_only_specs(2), train, gen)
    groups = ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
    assert set(plan.exchange_groups()) == set(groups) == set(gen.micro_dp_groups())
    assert (0, 2) in gen.tp_groups() and (1, 3) in gen.tp_groups()
    assert gen.replica_groups()[0] == (0, 2)


def test_replicas_have_shifted_plans():
    specs, train = cut_only_specs(4), ShardGrid(tp=2, pp=2, dp=3)
    gen = generation_grid(train, tp=1, pp=2, num_layers=4)
    first, third = (make_plan(specs, train, gen, replica=r) for r in (0, 2))
    shifted = [(t.tensor, t.src + 4, t.dst + 4, t.bucket, t.block) for t in first.transfers]
    assert shifted == [(t.tensor, t.src, t.dst, t.bucket, t.block) for t in third.transfers]
    assert first.exchange_groups() == third.exchange_groups()


@pytest.mark.parametrize("bucket_bytes", [2048, 5000, 60_000, 10**9])
def test_buckets_are_bounded_and_few(bucket_bytes):
    """No rank receives more than the bound per bucket; their number follows bytes, not tensors."""
    train = ShardGrid(tp=4)
    gen = generation_grid(train, tp=1)
    (plan,) = check_by_simulation(cut_only_specs(4), train, gen, bucket_bytes=bucket_bytes)
    filled: dict[tuple[int, int], int] = {}
    for t in plan.transfers:
        if t.bucket != LOCAL:
            filled[t.bucket, t.dst] = filled.get((t.bucket, t.dst), 0) + t.block.nbytes
    assert max(filled.values()) <= bucket_bytes
    assert {b for b, _ in filled} == set(range(plan.num_buckets))
    if bucket_bytes == 10**9:
        assert plan.num_buckets == 1


def test_bucket_smaller_than_a_row_is_refused():
    train = ShardGrid(tp=2)
    with pytest.raises(ValueError, match="bucket_bytes=8"):
        make_plan(cut_only_specs(1), train, generation_grid(train, tp=1), bucket_bytes=8)


def test_interleavings_by_hand():
    """heads 4, KV 2: rows [q0,q1,k0,v0 | q2,q3,k1,v1]; one KV head copied over two ranks; fc1."""
    qkv = TensorSpec("q", (8,), "float32", Cut("qkv", 4, 2), "every")
    assert qkv.intervals(2, 0) == ((0, 4),) and qkv.intervals(2, 1) == ((4, 4),)
    one = TensorSpec("q", (6,), "float32", Cut("qkv", 4, 1), "every")
    assert one.intervals(2, 0) == ((0, 3),), "Megatron-Core cuts through the group"
    assert one.intervals(2, 0, replicate_kv=True) == ((0, 2), (4, 2))
    assert one.intervals(2, 1, replicate_kv=True) == ((2, 4),)
    fc1 = TensorSpec("f", (8, 3), "float32", Cut("gate_up"), "every")
    assert fc1.intervals(2, 1) == ((2, 2), (6, 2))


def test_stages_of_interleaved_and_tied_models():
    grid = ShardGrid(pp=2, vpp=2, layer_split=(1, 2, 0, 1))
    assert grid.layer_stages(4) == (0, 1, 1, 1)
    tied = TensorSpec("e", (4, 2), "float32", Cut("vocabulary"), "first_and_last")
    assert tied.stages(2, ()) == (0, 1) and tied.stages(1, ()) == (0,)


def test_unchanged_tensors_are_used_in_place():
    """Norms always; every tensor of the own stage where only the pipeline shrinks."""
    sizes = DecoderSizes(layers=2, hidden=8, ffn=8, heads=4, kv_heads=2, head_dim=2, vocab=8)
    specs, train = decoder_specs(sizes), ShardGrid(tp=2, pp=2)
    names = [s.name for s in specs]
    narrow = make_plan(specs, train, generation_grid(train, tp=1, pp=2, num_layers=2))
    assert {names[i] for i in narrow.unchanged(0)} == {
        "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight",
    }  # fmt: skip
    merged = make_plan(specs, train, generation_grid(train, tp=2, pp=1, num_layers=2))
    own = {n for n in names if "layers.0" in n or n.startswith("embedding")}
    assert {names[i] for i in merged.unchanged(0)} == own


def test_json_round_trip():
    sizes = DecoderSizes(layers=3, hidden=8, ffn=8, heads=4, kv_heads=2, head_dim=2, vocab=8)
    train = ShardGrid(tp=2, pp=2, layer_split=(1, 2))
    plan = make_plan(decoder_specs(sizes), train, generation_grid(train, tp=1, num_layers=3))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: generation_grid(ShardGrid(tp=4), tp=3), "choose one of"),
        (lambda: generation_grid(ShardGrid(pp=4), tp=1, pp=3), "generation pp=3"),
        (lambda: ShardGrid(tp=0), "tp=0"),
        (lambda: ShardGrid(pp=2, layer_split=(1,)), "2 layer counts"),
        (lambda: ShardGrid(pp=2).layer_stages(3), "give layer_split"),
        (lambda: ShardGrid(pp=2, layer_split=(1, 1)).layer_stages(3), "adds up to 2"),
        (lambda: ShardGrid().coordinate(1), "outside"),
        (lambda: Cut("diagonal"), "diagonal"),
        (lambda: Cut("qkv", 3, 2), "multiple"),
        (lambda: TensorSpec("x", (2,), "int3", Cut("rows"), "every"), "int3"),
        (lambda: TensorSpec("x", (2,), "int8", Cut("columns"), "every"), "no axis 1"),
        (lambda: TensorSpec("x", (2,), "int8", Cut("rows")), "layer"),
        (lambda: TensorSpec("x", (6,), "int8", Cut("rows"), "every").intervals(4, 0), "x .*4"),
        (
            lambda: TensorSpec("x", (10,), "int8", Cut("qkv", 6, 2), "every").intervals(3, 0),
            "2 KV heads neither",
        ),
        (lambda: cut_of("decoder.layers.0.mystery.weight", None), "mystery"),
        (lambda: make_plan([], ShardGrid(tp=2), ShardGrid(tp=4)), "2 ranks"),
        (lambda: make_plan([], ShardGrid(), ShardGrid(), replica=1), "replica=1"),
        (lambda: make_plan([], ShardGrid(), ShardGrid(), bucket_bytes=0), "bucket_bytes=0"),
        (
            lambda: make_plan(
                [TensorSpec("x", (2,), "int8", Cut("rows"), "every")] * 2, ShardGrid(), ShardGrid()
            ),
            r"repeated: \['x'\]",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
