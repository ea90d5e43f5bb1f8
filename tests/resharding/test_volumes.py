"""Communication volume of the schemes: the published formulas and their exact counterpart."""

from fractions import Fraction

import pytest

from megatron_rl.resharding.decoder import LLAMA3_8B, DecoderSizes, decoder_specs
from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.plan import make_plan
from megatron_rl.resharding.volumes import (
    deepspeed_chat_bytes,
    micro_dp_bytes,
    peak_weight_bytes,
    received_bytes,
    whole_all_gather_bytes,
)


def test_seven_billion_parameters_from_tp8_to_tp2():
    """13.5 GB, t=8, d=2 → t_g=2: 12.66, 11.81 and 5.06 GB, as published."""
    m = 13_500_000_000
    assert round(deepspeed_chat_bytes(m, 8, 1, 2) / 10**9, 2) == Fraction(1266, 100)
    assert round(whole_all_gather_bytes(m, 8, 1) / 10**9, 2) == Fraction(1181, 100)
    assert round(micro_dp_bytes(m, 8, 1, 2, 1) / 10**9, 2) == Fraction(506, 100)
    assert peak_weight_bytes(m, 2, 1) == m // 2


def test_same_layout_moves_nothing():
    assert micro_dp_bytes(10**9, 4, 2, 4, 2) == 0


@pytest.mark.parametrize(("t", "p", "t_g", "p_g"), [(8, 1, 3, 1), (4, 4, 2, 3)])
def test_sizes_that_do_not_divide_are_refused(t, p, t_g, p_g):
    with pytest.raises(ValueError, match="must divide"):
        micro_dp_bytes(10**9, t, p, t_g, p_g)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="d=0"):
        deepspeed_chat_bytes(10**9, 8, 1, 0)


@pytest.mark.parametrize("t_g", [1, 2, 4, 8])
def test_norms_are_what_separates_the_formula_from_an_8b_model(t_g):
    """Llama 8B at t=8: the plan receives the formula's bytes for all but the replicated norms."""
    specs = decoder_specs(LLAMA3_8B)
    train = ShardGrid(tp=8)
    plan = make_plan(specs, train, generation_grid(train, tp=t_g))
    cut = sum(s.nbytes for s in specs if s.cut.kind != "replicated")
    assert plan.received_bytes(3) == micro_dp_bytes(cut, 8, 1, t_g, 1)


@pytest.mark.parametrize(
    ("train", "t_g", "p_g"),
    [
        (ShardGrid(tp=4, pp=2), 2, 1),
        (ShardGrid(tp=2, pp=4, layer_split=(1, 3, 2, 0)), 1, 2),
        (ShardGrid(tp=4, pp=2, dp=2, layer_split=(4, 2)), 2, 2),
    ],
)
def test_plan_receives_exactly_what_is_missing(train, t_g, p_g):
    """Uneven stages, tied embeddings, fewer KV heads than ranks: plan == needed minus held."""
    sizes = DecoderSizes(
        layers=6, hidden=32, ffn=48, heads=8, kv_heads=2, head_dim=4, vocab=64,
        tied=True, qkv_bias=True, qk_norm=True,
    )  # fmt: skip
    specs = decoder_specs(sizes)
    gen = generation_grid(train, tp=t_g, pp=p_g, num_layers=6)
    for replica in range(train.dp):
        plan = make_plan(specs, train, gen, replica=replica)
        for rank in plan.ranks:
            assert plan.received_bytes(rank) == received_bytes(specs, train, gen, rank)
