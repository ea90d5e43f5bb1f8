"""Megatron-Core's resharding planner as a second opinion: bitwise the same generation shards."""

import pytest

from megatron_rl.resharding.compare import compare
from megatron_rl.resharding.decoder import DecoderSizes
from megatron_rl.resharding.grid import ShardGrid

SIZES = DecoderSizes(
    layers=4, hidden=32, ffn=64, heads=8, kv_heads=8, head_dim=4, vocab=64, qk_norm=True,
    qkv_bias=True,
)  # fmt: skip


def run_compare(rank, world_size, train, t_g, p_g):
    return compare(rank, SIZES, train, t_g, p_g, repeats=1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "train", "t_g", "p_g"),
    [
        (2, ShardGrid(tp=2), 1, 1),
        (4, ShardGrid(tp=4), 2, 1),
        (4, ShardGrid(tp=2, pp=2), 2, 1),
        (8, ShardGrid(tp=8), 2, 1),
        (8, ShardGrid(tp=2, pp=2, dp=2), 1, 2),
    ],
)
def test_same_shards_as_megatron_core(ranks, world, train, t_g, p_g):
    """Same weights bit for bit, never more bytes, far fewer operations."""
    for figures in ranks(world, run_compare, train, t_g, p_g):
        ours, peer = figures["ours"], figures["megatron"]
        assert ours["received"] <= peer["received"]
        assert ours["messages"] <= 1 <= peer["messages"]
