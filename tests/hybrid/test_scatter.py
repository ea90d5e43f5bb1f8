"""Pure: which replica generates which sample; generation layouts against the planner's grid."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.parallel import Layout
from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.scatter import share_out


@given(
    lengths=st.lists(st.integers(1, 40), max_size=20), n=st.integers(1, 5),
    parts=st.integers(1, 8),
)  # fmt: skip
def test_every_sample_once_and_evenly(lengths, n, parts):
    prompts = [[number] * length for number, length in enumerate(lengths) for _ in range(n)]
    shares = share_out(prompts, parts)
    assert sorted(i for share in shares for i in share) == list(range(len(prompts)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    homes = [{i // n for i in share} for share in shares]
    split = [p for p in range(len(lengths)) if sum(p in home for home in homes) > 1]
    assert len(split) < parts, "only what does not divide is cut apart"


def test_long_prompts_are_spread():
    """Dealt back and forth, the tokens of 8 prompts differ by less than the shortest prompt."""
    prompts = [[number] * length for number, length in enumerate(range(10, 90, 10))]
    tokens = [sum(len(prompts[i]) for i in share) for share in share_out(prompts, 2)]
    assert abs(tokens[0] - tokens[1]) <= 10


@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), dp=st.integers(1, 3),
    data=st.data(),
)  # fmt: skip
def test_groups_are_those_of_the_plan(tp, pp, dp, data):
    """Layout (groups) and ShardGrid (plans) place every rank alike."""
    t_g = data.draw(st.sampled_from([t for t in (1, 2, 4) if tp % t == 0]))
    p_g = data.draw(st.sampled_from([p for p in (1, 2, 4) if pp % p == 0]))
    layout = Layout(world_size=tp * pp * dp, tp=tp, pp=pp)
    inner = layout.generation_layout(tp=t_g, pp=p_g)
    grid = generation_grid(ShardGrid(tp=tp, pp=pp, dp=dp), tp=t_g, pp=p_g, num_layers=8)
    for rank in range(layout.world_size):
        at = grid.coordinate(rank)
        assert inner.coordinates(rank) == (at.tp, at.replica, at.pp)
        assert inner.rank_at(tp=at.tp, dp=at.replica, pp=at.pp) == rank
    assert sorted(map(tuple, inner.inner_groups())) == sorted(grid.micro_dp_groups())
    for ranks in inner.inner_groups():
        places = [inner.coordinates(r)[1] % inner.inner_replicas for r in ranks]
        assert places == list(range(inner.inner_replicas))
