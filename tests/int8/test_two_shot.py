"""Rank layer: the two-shot protocol on 2 to 8 gloo ranks, against sums in fp64.

Suffixes: N ranks, S values of a shard, b values of a block.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_rl.comm.hierarchy import build_node_groups, spread_inside, sum_inside
from megatron_rl.comm.sync_unit import SyncUnit, plan_bucket
from megatron_rl.comm.two_shot import Rules, Segment, TwoShot, noise_seed
from megatron_rl.kernels import int8_allreduce as int8

pytestmark = pytest.mark.ranks


def gradients(ranks: int, values: int, kind: str) -> list[torch.Tensor]:
    """What every rank holds, drawn alike on all ranks of a test."""
    x = torch.randn(ranks, values)
    if kind == "outliers":
        x[:, ::97] *= 1e4
    elif kind == "denormals":
        x *= 1e-41
    elif kind == "zeros":
        x.zero_()
    elif kind == "max":
        x = x.sign() * torch.finfo(torch.float32).max / (2 * ranks)
    return list(x)


def bound(parts: list[torch.Tensor], block: int, shots: int) -> torch.Tensor:
    """Per element: sum over ranks of max|block| / 254, and max|sum of block| / 254 for shot 2."""

    def top(x):
        padded = torch.nn.functional.pad(x.double().abs(), (0, -x.numel() % block))
        return padded.view(-1, block).amax(1).repeat_interleave(block)[: x.numel()]

    total = sum(top(part) for part in parts) / 254
    if shots == 2:
        # The sum that is quantised again already carries the first error.
        exact = sum(part.double() for part in parts)
        total = total + (top(exact) + total) / 254
    # fp32 rounding of quotients and sums, and the coarse scales of subnormal blocks.
    return total * (1 + 1e-4) + sum(top(part) for part in parts) * 1e-6 + 1e-42


def rules(block: int, gather: bool, **options) -> Rules:
    backend = int8.select_backend("cpu", options.pop("backend", None))
    return Rules(group=dist.group.WORLD, backend=backend, block=block, gather=gather, **options)


def reduce_once(rank, world, seed, shard, block, gather, kind, options):
    torch.manual_seed(seed)
    mine = gradients(world, world * shard, kind)[rank].view(world, shard).clone()
    shots = TwoShot([Segment(mine)], rules(block, gather, **options), step=3)
    shots.launch()
    shots.finish()
    return mine, shots.bytes_sent


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("kind", ["normal", "outliers", "denormals", "zeros", "max"])
@pytest.mark.parametrize("block", [128, 256])
def test_error_bound_and_equal_replicas(ranks, world, kind, block):
    seed, shard = int(torch.randint(2**31, ())), block * 5 + int(torch.randint(1, block, ()))
    torch.manual_seed(seed)
    parts = gradients(world, world * shard, kind)
    exact = sum(part.double() for part in parts).view(world, shard)
    per_row = [[part.view(world, shard)[n] for part in parts] for n in range(world)]
    for gather in (True, False):
        options = {"chunk": 2 * block * world}
        results = ranks(world, reduce_once, seed, shard, block, gather, kind, options)
        limit = torch.stack([bound(rows, block, 1 + gather) for rows in per_row])
        for rank, (got, _) in enumerate(results):
            rows = slice(None) if gather else slice(rank, rank + 1)
            error = (got[rows].double() - exact[rows]).abs()
            assert (error <= limit[rows]).all(), (kind, gather, (error / limit[rows]).max())
        if gather:
            assert all(torch.equal(got, results[0][0]) for got, _ in results)


def test_fused_chunked_and_torch_paths_give_the_same_bits(ranks):
    seed, shard = int(torch.randint(2**31, ())), 2000
    choices = [{}, {"fused": True}, {"chunk": 1024}, {"backend": "torch"}]
    results = [ranks(2, reduce_once, seed, shard, 256, True, "normal", c)[0][0] for c in choices]
    assert all(torch.equal(results[0], other) for other in results[1:])


def count_wire(rank, world, seed, shard, block, gather):
    """Bytes handed to collectives that go to other ranks, counted at torch.distributed itself."""
    gather_name = "all_gather_into_tensor"
    if hasattr(dist, "all_gather_single"):
        gather_name = "all_gather_single"
    sent, real = [0], (dist.all_to_all_single, getattr(dist, gather_name))

    def all_to_all(out, tensor, **arguments):
        sent[0] += tensor.nbytes * (world - 1) // world
        return real[0](out, tensor, **arguments)

    def all_gather(out, tensor, **arguments):
        sent[0] += tensor.nbytes * (world - 1)
        return real[1](out, tensor, **arguments)

    dist.all_to_all_single = all_to_all
    setattr(dist, gather_name, all_gather)
    try:
        _, claimed = reduce_once(rank, world, seed, shard, block, gather, "normal", {})
    finally:
        dist.all_to_all_single = real[0]
        setattr(dist, gather_name, real[1])
    return sent[0], claimed


@pytest.mark.parametrize("world", [2, 4])
def test_wire_bytes_are_the_formula(ranks, world):
    block, shard = 256, 256 * 64
    for gather in (True, False):
        for counted, claimed in ranks(world, count_wire, 1, shard, block, gather):
            shots = 2 if gather else 1
            values = world * shard
            formula = shots * (world - 1) / world * values * (1 + 4 / block)
            assert counted == claimed == formula
            assert counted == shots * (world - 1) * int8.message_bytes(shard, block)
    if world == 2:
        assert formula * 2 / values == pytest.approx(1.016, abs=4e-4)


def reduce_unit(rank, world, seed, options):
    """A bucket with exempt parts and a tail, through several steps with error feedback."""
    torch.manual_seed(seed)
    numel, block = 5000, 128
    parts = gradients(world, numel, options.get("kind", "outliers"))
    for part in parts:
        part[640:740] *= options.get("exempt_size", 1.0)
    grad = parts[rank].clone()
    nodes = options.get("nodes") and build_node_groups([list(range(world))], options["nodes"])
    rule = Rules(
        group=nodes.between if nodes else dist.group.WORLD,
        backend=int8.select_backend("cpu"),
        block=block,
        gather=not options["sharded"],
        factor=1 / world,
    )
    plan = plan_bucket(
        grad, [(0, 97), (640, 740)], ranks=world, block=block, sharded=options["sharded"],
        min_values=options.get("min_values", 0),
    )  # fmt: skip
    unit = SyncUnit(
        [plan], dist.group.WORLD, rule, nodes=nodes or None, residual_dtype=options.get("residual")
    )
    results = []
    for _ in range(options.get("steps", 1)):
        grad.copy_(parts[rank])
        unit.launch()
        unit.wait()
        results.append(grad.clone())
    return torch.stack(results), sum(parts) / world, plan.shard


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("nodes", [None, 2])
def test_exempt_values_are_exact_and_the_rest_close(ranks, sharded, nodes):
    options = {"sharded": sharded, "nodes": nodes, "kind": "normal", "exempt_size": 1e5}
    results = ranks(4, reduce_unit, int(torch.randint(2**31, ())), options)
    for rank, (steps, mean, shard) in enumerate(results):
        for exempt in (slice(0, 97), slice(640, 740), slice(4 * shard, None)):
            # The order of the sum may differ, and values of 1e5 cancel.
            torch.testing.assert_close(steps[0][exempt], mean[exempt], rtol=1e-5, atol=0.1)
        # Exempt values are large: left in their blocks they would coarsen the values beside them.
        compressed = torch.ones(5000, dtype=torch.bool)
        compressed[:97] = compressed[640:740] = False
        if sharded:
            compressed[: rank * shard] = compressed[(rank + 1) * shard :] = False
        error = (steps[0] - mean)[compressed].norm() / mean[compressed].norm()
        assert 0 < error < 0.03
    if not sharded:
        assert all(torch.equal(steps, results[0][0]) for steps, _, _ in results)


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [True, False])
def test_error_feedback_makes_the_average_exact(ranks, residual, sharded):
    options = {"sharded": sharded, "residual": residual, "steps": 40, "kind": "normal"}
    seed = int(torch.randint(2**31, ()))
    for rank, (steps, mean, shard) in enumerate(ranks(2, reduce_unit, seed, options)):
        owned = slice(rank * shard, (rank + 1) * shard) if sharded else slice(None)
        once = (steps[0] - mean)[owned].norm()
        averaged = (steps.mean(0) - mean)[owned].norm()
        # Without feedback the error of a fixed gradient is the same every step.
        assert averaged < once / 15


def test_small_bucket_travels_whole(ranks):
    options = {"sharded": False, "min_values": 5001}
    for steps, mean, shard in ranks(2, reduce_unit, 5, options):
        assert shard == 0
        torch.testing.assert_close(steps[0], mean)


def reduce_broken(rank, world, sharded):
    torch.manual_seed(0)
    grad = torch.randn(4096)
    if rank == 1:
        grad[300] = float("inf")
    plan = plan_bucket(grad, [], ranks=world, block=256, sharded=sharded, min_values=0)
    rule = Rules(dist.group.WORLD, int8.select_backend("cpu"), 256, gather=not sharded)
    unit = SyncUnit([plan], dist.group.WORLD, rule, residual_dtype=torch.float32)
    unit.launch()
    unit.wait()
    return grad, unit.take_nonfinite(), unit.take_nonfinite()


def test_inf_on_one_rank_reaches_every_rank(ranks):
    for rank, (grad, count, again) in enumerate(ranks(2, reduce_broken, False)):
        assert grad[256:512].isnan().all()
        assert grad[:256].isfinite().all() and grad[512:].isfinite().all()
        assert (count, again) == (rank, 0)
    owner, other = ranks(2, reduce_broken, True)
    assert owner[0][256:512].isnan().all() and other[0][2048:].isfinite().all()


def two_levels(rank, world):
    nodes = build_node_groups([list(range(world))], 2)
    grad = torch.arange(world * 3, dtype=torch.float32).view(world, 3) + 100 * rank
    summed = sum_inside(grad, nodes)
    spread = torch.zeros_like(grad)
    spread_inside(summed, spread, nodes, True)
    uneven = None
    try:
        build_node_groups([[0, 1, 2, 3]], 3)
    except ValueError as error:
        uneven = str(error)
    return summed, spread, uneven, build_node_groups([[0, 1, 2, 3]], 4)


def test_two_levels_give_each_rank_its_shard(ranks):
    full = torch.arange(12, dtype=torch.float32).view(4, 3)
    for rank, (summed, spread, uneven, flat) in enumerate(ranks(4, two_levels)):
        node, local = divmod(rank, 2)
        node_sum = 2 * full + 100 * (4 * node + 1)
        assert torch.equal(summed, node_sum[[local, 2 + local]])
        assert torch.equal(spread, node_sum)
        assert "hierarchical" in uneven and flat is None


def test_noise_seeds_differ():
    seeds = {noise_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) > 7990
