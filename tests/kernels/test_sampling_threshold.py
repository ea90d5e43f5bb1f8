"""The top-k/top-p threshold against sorting, whole and over vocabulary shards on gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels.sampling import kept_threshold


def by_sorting(logits_V, tau, top_k, top_p):
    """Lowest kept logit of one row; top-k first, then top-p of what is left, ties kept."""
    kept = logits_V.double().sort(descending=True).values
    if 0 < top_k <= len(kept):
        kept = kept[kept >= kept[top_k - 1]]
    elif top_p >= 1:
        return -torch.inf
    if top_p < 1:
        share = (kept / (tau if tau > 0 else 1.0)).softmax(0)
        kept = kept[share.cumsum(0) - share < top_p]
    return kept[-1].item()


def random_case(rows, columns, seed):
    torch.manual_seed(seed)
    logits = torch.randn(rows, columns) * 4
    tau = 0.5 + torch.rand(rows)
    top_k = torch.randint(1, columns // 2, (rows,))
    top_p = 0.05 + 0.9 * torch.rand(rows)
    top_k[::5], top_p[::3] = 0, 1.0
    return logits, tau, top_k, top_p


def test_equals_sorting(device, backend):
    rows = 40 if backend == "torch" or device.type == "cuda" else 3
    logits, tau, top_k, top_p = random_case(rows, 2100, seed=1)
    got = kept_threshold(
        logits.to(device), tau.to(device), vocab_size=2070, top_k_T=top_k.to(device),
        top_p_T=top_p.to(device), backend=backend,
    )  # fmt: skip
    cases = zip(logits[:, :2070], tau, top_k.tolist(), top_p.tolist(), strict=True)
    assert got.tolist() == [by_sorting(*case) for case in cases]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([-3.0, -0.5, 0.0, -0.0, 0.25, 2.0, 2.0, 7.5]), min_size=1),
    top_k=st.integers(-1, 12),
    top_p=st.sampled_from([0.01, 0.3, 0.75, 0.999, 1.0, 1.5]),
    tau=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_ties_and_small_vocabularies(values, top_k, top_p, tau):
    logits = torch.tensor([values])
    got = kept_threshold(
        logits, torch.tensor([tau]), vocab_size=len(values), top_k_T=torch.tensor([top_k]),
        top_p_T=torch.tensor([top_p]), backend="torch",
    )  # fmt: skip
    # fp32 and fp64 may part ways exactly where a share reaches p: accept either neighbour then.
    allowed = {by_sorting(logits[0], tau, top_k, top_p * (1 + e)) for e in (-1e-6, 0, 1e-6)}
    assert got.item() in allowed


@pytest.mark.parametrize("only", ["top_k_T", "top_p_T"])
def test_one_limit_alone(only):
    logits, tau, top_k, top_p = random_case(6, 500, seed=2)
    limit = {"top_k_T": top_k, "top_p_T": top_p}[only]
    got = kept_threshold(logits, tau, vocab_size=500, **{only: limit})
    k = top_k.tolist() if only == "top_k_T" else [0] * 6
    p = top_p.tolist() if only == "top_p_T" else [1.0] * 6
    cases = zip(logits, tau, k, p, strict=True)
    assert got.tolist() == [by_sorting(*case) for case in cases]


def test_minus_infinity_and_bf16_logits():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 3.0]]).bfloat16()
    one = torch.ones(1)
    for k, expected in ((1, 3.0), (2, 1.0), (3, -torch.inf), (9, -torch.inf)):
        got = kept_threshold(logits, one, vocab_size=4, top_k_T=torch.tensor([k]))
        assert got.item() == expected and got.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_keep_the_same_tokens_in_fewer_rounds(dtype):
    logits, tau, top_k, top_p = random_case(30, 700, seed=4)
    logits = (logits - 8).to(dtype)
    limits = dict(top_k_T=top_k, top_p_T=top_p)
    half = kept_threshold(logits, tau, vocab_size=700, **limits)
    full = kept_threshold(logits.float(), tau, vocab_size=700, **limits)
    assert torch.equal(logits.float() >= half[:, None], logits.float() >= full[:, None])


def threshold_of_my_shard(rank, world_size, cuts):
    logits, tau, top_k, top_p = random_case(8, cuts[-1], seed=3)
    shard = logits[:, cuts[rank] : cuts[rank + 1]].contiguous()
    return kept_threshold(
        shard, tau, vocab_size=880, vocab_start=cuts[rank], top_k_T=top_k, top_p_T=top_p,
        group=dist.group.WORLD,
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("cuts", [(0, 450, 900), (0, 890, 900)], ids=str)
def test_shards_agree_to_the_bit(ranks, cuts):
    logits, tau, top_k, top_p = random_case(8, 900, seed=3)
    whole = kept_threshold(logits, tau, vocab_size=880, top_k_T=top_k, top_p_T=top_p)
    for threshold in ranks(2, threshold_of_my_shard, cuts):
        assert torch.equal(threshold, whole)
