"""Sampling from vocabulary shards: the distribution, its invariances, its log-probs."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.kernels.sampling import kept_threshold, merge, sample, sample_shard, stream_key
from megatron_rl.kernels.sampling.noise import gumbel, noise_bits

PINNED_KEYS = [-6411193824288604561, -4838594755968170389, 3096796635518069300]
PINNED_BITS = [[1501685361, 458651738, 1833060448], [2274154142, 1231506877, 740360296]]


def random_rows(device, rows, columns, seed):
    torch.manual_seed(seed)
    logits = (torch.randn(rows, columns) * 3).to(device)
    temperature = (0.5 + torch.rand(rows)).to(device)
    stream = torch.tensor([stream_key(seed, request) for request in range(rows)], device=device)
    return logits, temperature, stream, torch.randint(0, 9000, (rows,)).to(device)


def sharded(logits, *rows, cuts, vocab_size, threshold=None, backend):
    records = [
        sample_shard(
            logits[:, start:stop], *rows, vocab_size=vocab_size, vocab_start=start,
            threshold_T=threshold, backend=backend,
        )
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
    ]  # fmt: skip
    return merge(torch.stack(records), backend=backend)


def chi_square_bound(cells):
    """About the 1 − 1e-5 quantile of chi-square (Wilson and Hilferty 1931)."""
    dof = cells - 1
    return dof * (1 - 2 / (9 * dof) + 4.26 * (2 / (9 * dof)) ** 0.5) ** 3


def draw_many(logits_V, temperature, count, *, seed, threshold=None, backend="torch", device="cpu"):
    """Token counts of `count` draws from one distribution, as rows of one batch."""
    rows = logits_V.to(device).expand(count, -1).contiguous()
    stream = torch.tensor([stream_key(seed, r) for r in range(count)], device=device)
    position = torch.arange(count, device=device) % 50
    threshold_T = None if threshold is None else torch.full((count,), threshold, device=device)
    tau = torch.full((count,), temperature, device=device)
    drawn = sample(
        rows, tau, stream, position, vocab_size=len(logits_V), threshold_T=threshold_T,
        backend=backend,
    )  # fmt: skip
    return drawn.token_T.cpu().bincount(minlength=len(logits_V))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("cut", [False, True], ids=["all", "kept"])
def test_chi_square_against_softmax(temperature, cut):
    torch.manual_seed(int(temperature * 10))
    logits = torch.randn(37) * 1.5
    threshold = logits.sort().values[20].item() if cut else None
    counts = draw_many(logits, temperature, 30_000, seed=11, threshold=threshold)
    kept = logits >= threshold if cut else torch.ones(37, dtype=torch.bool)
    assert not counts[~kept].any()
    expected = (logits[kept].double() / temperature).softmax(0) * 30_000
    statistic = ((counts[kept] - expected).square() / expected).sum().item()
    assert statistic < chi_square_bound(int(kept.sum()))


def test_successive_positions_and_requests_are_independent():
    streams = torch.tensor([stream_key(5, request) for request in range(200)])
    position = torch.arange(100).repeat(200)
    flat = torch.zeros(20_000, 8)
    drawn = sample(
        flat, torch.ones(20_000), streams.repeat_interleave(100), position, vocab_size=8
    ).token_T.view(200, 100)
    pairs = {"positions": (drawn[:, :-1], drawn[:, 1:]), "requests": (drawn[:-1], drawn[1:])}
    for name, (first, second) in pairs.items():
        cells = (first * 8 + second).flatten().bincount(minlength=64).double()
        expected = cells.sum() / 64
        assert ((cells - expected).square() / expected).sum() < chi_square_bound(64), name


def test_noise_is_gumbel_far_into_the_winning_tail():
    bits = torch.randint(0, 2**32, (200_000,))
    values = gumbel(bits).double()
    exact = -torch.log(-torch.log1p(-(bits.double() + 0.5) / 2**32))
    error = (values - exact).abs()
    assert error[values > 0].max() < 2e-6, "values that can win"
    assert error.max() < 1e-2, "values that lose: 1 − w is coarse there"
    assert abs(values.mean() - 0.5772157) < 0.02 and abs(values.var() - 1.6449341) < 0.05
    ends = gumbel(torch.tensor([0, 1, 2**32 - 1]))
    assert ends.isfinite().all() and ends[0] > ends[1] > 21


def test_noise_bits_are_pinned():
    """Changing the noise would silently change every run that is resumed or replayed."""
    assert [stream_key(0, 0), stream_key(1, 2), stream_key(2**40, 7)] == PINNED_KEYS
    stream, position = torch.tensor([PINNED_KEYS[1], -3]), torch.tensor([0, 2**33 + 5])
    assert noise_bits(stream, position, torch.tensor([0, 1, 128255])).tolist() == PINNED_BITS


def test_both_paths_draw_the_same_tokens(device):
    logits, *rows = random_rows(device, row_count("triton", device), 3000, seed=21)
    by_torch, by_triton = (
        sample(logits, *rows, vocab_size=2990, backend=choice) for choice in ("torch", "triton")
    )
    assert torch.equal(by_torch.token_T, by_triton.token_T)
    torch.testing.assert_close(by_torch.logprob_T, by_triton.logprob_T, rtol=1e-5, atol=2e-6)


def row_count(backend, device):
    """Interpreted rows cost 50 ms each."""
    return 12 if backend == "torch" or device.type == "cuda" else 3


@pytest.mark.parametrize(
    "cuts",
    [(0, 2048, 4096, 4500), (0, 1, 4500), (0, 1125, 2250, 3375, 4500), (0, 4500, 4600, 4700)],
    ids=str,
)
@pytest.mark.parametrize("cut", [False, True], ids=["all", "kept"])
def test_token_does_not_depend_on_the_shards(device, backend, cuts, cut):
    count = row_count(backend, device)
    logits, *rows = random_rows(device, count, cuts[-1], seed=22)
    rows[0][1] = 0.0
    threshold = torch.linspace(-2, 8, count, device=device) if cut else None
    whole = sample(logits, *rows, vocab_size=4490, threshold_T=threshold, backend=backend)
    parts = sharded(logits, *rows, cuts=cuts, vocab_size=4490, threshold=threshold, backend=backend)
    assert torch.equal(whole.token_T, parts.token_T)
    for got, expected in zip(parts[1:], whole[1:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


def test_token_does_not_depend_on_batch_mates(device, backend):
    count = row_count(backend, device)
    logits, *rows = random_rows(device, count, 500, seed=23)
    together = sample(logits, *rows, vocab_size=500, backend=backend)
    order = torch.randperm(count).to(device)
    shuffled = sample(logits[order], *(r[order] for r in rows), vocab_size=500, backend=backend)
    alone = sample(logits[2:3], *(r[2:3] for r in rows), vocab_size=500, backend=backend)
    for field, mixed, single in zip(together, shuffled, alone, strict=True):
        assert torch.equal(field[order], mixed) and torch.equal(field[2:3], single)


def test_seed_request_and_position_each_change_the_draw():
    flat, tau = torch.zeros(1, 1 << 16), torch.ones(1)

    def token(seed, request, position):
        stream = torch.tensor([stream_key(seed, request)])
        return sample(flat, tau, stream, torch.tensor([position]), vocab_size=1 << 16).token_T

    tokens = {int(token(*c)) for c in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**31)]}
    assert len(tokens) == 5
    assert token(3, 4, 5) == token(3, 4, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_are_log_softmax_in_fp32(device, backend, dtype):
    logits, tau, *rows = random_rows(device, row_count(backend, device), 2500, seed=24)
    logits = logits.to(dtype)
    threshold = torch.full_like(tau, 2.0)
    drawn = sample(logits, tau, *rows, vocab_size=2400, threshold_T=threshold, backend=backend)
    scaled = logits[:, :2400].double() / tau.double()[:, None]
    kept = scaled.masked_fill(logits[:, :2400] < 2.0, -torch.inf)
    index = drawn.token_T[:, None]
    for got, distribution in ((drawn.logprob_T, scaled), (drawn.kept_logprob_T, kept)):
        expected = distribution.log_softmax(-1).gather(1, index).squeeze(1)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=3e-6)
    assert (drawn.kept_logprob_T > drawn.logprob_T).all()


def test_known_logprobs_with_temperature_and_padding(device, backend):
    count = 4 * row_count(backend, device)
    logits = torch.tensor([[0.0, 1, 2, 3]] * count, device=device)
    rows = [torch.arange(count, device=device)] * 2
    half = sample(logits, torch.full_like(logits[:, 0], 0.5), *rows, vocab_size=4, backend=backend)
    top = half.logprob_T[half.token_T == 3]
    torch.testing.assert_close(top, torch.full_like(top, -0.1450780), rtol=1e-6, atol=1e-6)
    padded = sample(logits, torch.ones_like(logits[:, 0]), *rows, vocab_size=3, backend=backend)
    table = torch.tensor([-2.4076059, -1.4076059, -0.4076060], device=device)
    assert len(top) and padded.token_T.max() == 2
    torch.testing.assert_close(padded.logprob_T, table[padded.token_T], rtol=1e-6, atol=1e-6)


def test_zero_temperature_is_greedy_with_untempered_logprobs(device, backend):
    logits, _, *rows = random_rows(device, 3, 2500, seed=25)
    logits[0, [7, 2100]] = 50.0
    drawn = sample(logits, torch.zeros(3, device=device), *rows, vocab_size=2500, backend=backend)
    assert torch.equal(drawn.token_T[1:], logits[1:].argmax(-1))
    assert drawn.token_T[0] == 7, "the lowest id wins a tie"
    expected = logits.log_softmax(-1).gather(1, drawn.token_T[:, None]).squeeze(1)
    torch.testing.assert_close(drawn.logprob_T, expected, rtol=1e-6, atol=3e-6)


def test_masked_and_broken_rows(device, backend):
    logits, tau, *rows = random_rows(device, 4, 300, seed=26)
    logits[0] = -torch.inf
    logits[1, :] = -torch.inf
    logits[1, 123] = -4.0
    logits[2, 50:] = torch.nan
    threshold = torch.tensor([-torch.inf, -torch.inf, -torch.inf, 1e9], device=device)
    drawn = sample(logits, tau, *rows, vocab_size=300, threshold_T=threshold, backend=backend)
    assert drawn.token_T[[0, 3]].tolist() == [-1, -1], "nothing to draw"
    assert drawn.token_T[1] == 123 and drawn.logprob_T[1].abs() < 1e-6
    assert drawn.token_T[2] < 50 and drawn.logprob_T[2].isnan(), "a NaN must not be laundered"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_draws_follow_the_distribution(device):
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0])
    counts = draw_many(logits, 1.3, 50_000, seed=27, backend="triton", device=device)
    expected = (logits.double() / 1.3).softmax(0) * 50_000
    assert ((counts - expected).square() / expected).sum() < chi_square_bound(5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_full_vocabulary_on_four_shards_draws_the_same_tokens(device):
    logits, *rows = random_rows(device, 2048, 128256, seed=28)
    logits /= 30  # nearly flat: rounding would move many boundaries of an inverse CDF
    whole = sample(logits, *rows, vocab_size=128256)
    cuts = (0, 32064, 64128, 96192, 128256)
    parts = sharded(logits, *rows, cuts=cuts, vocab_size=128256, backend="auto")
    assert torch.equal(whole.token_T, parts.token_T)
    plain = sample(logits, *rows, vocab_size=128256, backend="torch")
    assert (plain.token_T != whole.token_T).sum() <= 2, "the logarithms differ by rounding only"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(vocab_size=0), "vocab_size=0"),
        (dict(vocab_size=2**24 + 1), "must be between 1 and 16777216"),
        (dict(temperature_T=torch.ones(3)), "2 rows need per-row tensors"),
        (dict(logits_TV=torch.zeros(8, 2).T), "contiguous rows"),
    ],
)
def test_bad_input_is_named(change, message):
    index = torch.zeros(2, dtype=torch.int64)
    good = dict(
        logits_TV=torch.zeros(2, 8), temperature_T=torch.ones(2), stream_T=index, position_T=index,
        vocab_size=8,
    )  # fmt: skip
    for draw in (sample, sample_shard):
        with pytest.raises(ValueError, match=message):
            draw(**(good | change))
    search = {k: v for k, v in (good | change).items() if k not in ("stream_T", "position_T")}
    with pytest.raises(ValueError, match=message):
        kept_threshold(**search, top_k_T=index)
    with pytest.raises(ValueError, match=r"fp32 \[R, 5, T\]"):
        merge(torch.zeros(2, 4, 3))
