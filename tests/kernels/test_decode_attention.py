"""Paged decode attention against dense fp64 attention; compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

import inspect

import pytest
import torch

from megatron_rl.kernels.decode_attention import NewToken, decode_attention
from megatron_rl.kernels.rope_kv_write import rope_kv_write, rope_table

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def paged_case(
    device, dtype, contexts, *, heads, groups, dim, block, table_blocks, seed, window=None
):
    """Random q, caches and block table; whatever a kernel must not read is NaN or out of range."""
    torch.manual_seed(seed)
    rows = len(contexts)
    total = rows * table_blocks + 3
    q = torch.randn(rows, heads, dim).to(device, dtype)
    caches = [torch.full((total, block, groups, dim), torch.nan) for _ in range(2)]
    table = torch.randperm(total)[: rows * table_blocks].view(rows, table_blocks).int()
    for row, context in enumerate(contexts):
        first = max(context - (window or context), 0)
        for n in range(first, context):
            for cache in caches:
                cache[table[row, n // block], n % block] = torch.randn(groups, dim)
        table[row, -(-context // block) :] = 2**30
        table[row, : first // block] = -(2**30)
    k, v = (cache.to(device, dtype) for cache in caches)
    return q, k, v, table.to(device), torch.tensor(contexts, dtype=torch.int32, device=device)


def dense_fp64(q, k_cache, v_cache, table, context, scale, window=None):
    rows = []
    for row, length in enumerate(context.tolist()):
        if length == 0:
            rows.append(torch.zeros_like(q[row], dtype=torch.float64))
            continue
        blocks = table[row, : -(-length // k_cache.shape[1])].long().clamp(min=0)
        seen = slice(max(length - (window or length), 0), length)
        k, v = (c[blocks].flatten(0, 1)[seen].double() for c in (k_cache, v_cache))
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        weights = (torch.einsum("hd,nhd->hn", q[row].double(), k) * scale).softmax(-1)
        rows.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(rows)


def relative_error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "block", "split"),
    [(8, 2, 64, 16, None), (4, 1, 128, 32, 64), (3, 3, 96, 16, 64), (10, 2, 64, 64, 128)],
)
def test_equals_dense_attention(device, backend, dtype, heads, groups, dim, block, split):
    table_blocks = 192 // block
    contexts = [0, 1, 63, 64, 65, 192, 137]
    case = paged_case(
        device, dtype, contexts, heads=heads, groups=groups, dim=dim, block=block,
        table_blocks=table_blocks, seed=heads * dim,
    )  # fmt: skip
    out = decode_attention(*case, 0.11, split_size=split, backend=backend)
    assert out.dtype == dtype and out.shape == case[0].shape
    assert relative_error(out, dense_fp64(*case, 0.11)) < TOLERANCE[dtype]
    assert not out[0].any(), "a row without context must be zeros"


@pytest.mark.parametrize("window", [1, 7, 64, 100, 192, 1000])
def test_a_window_sees_the_last_tokens_and_reads_no_others(device, backend, window):
    """Before the window the cache is NaN, and a block's number is none."""
    contexts = [0, 1, 63, 64, 65, 192, 137, 101]
    case = paged_case(
        device, torch.float32, contexts, heads=6, groups=2, dim=64, block=16, table_blocks=12,
        seed=window, window=window,
    )  # fmt: skip
    for split in (None, 64) if backend == "triton" else (None,):
        out = decode_attention(*case, 0.11, window=window, split_size=split, backend=backend)
        assert relative_error(out, dense_fp64(*case, 0.11, window)) < 1e-6
        assert not out[0].any()
    q, k, v, table, context = case
    alone = decode_attention(
        q[5:6], k, v, table[5:6], context[5:6], 0.11, window=window, backend=backend
    )
    together = decode_attention(*case, 0.11, window=window, backend=backend)
    assert torch.equal(alone[0], together[5]), "bits do not depend on batch mates"


def test_a_window_without_a_token_is_refused():
    cache = torch.zeros(4, 16, 2, 64)
    table, context = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        decode_attention(torch.zeros(2, 4, 64), cache, cache, table, context, 0.1, window=0)


def test_head_dim_256_and_many_splits(device):
    case = paged_case(
        device, torch.float32, [1200, 17], heads=2, groups=1, dim=256, block=16, table_blocks=75,
        seed=5,
    )  # fmt: skip
    out = decode_attention(*case, 0.06, split_size=64, backend="triton")
    assert relative_error(out, dense_fp64(*case, 0.06)) < 1e-6


def test_large_scores_do_not_overflow(device, backend):
    case = paged_case(
        device, torch.float32, [100, 40], heads=2, groups=2, dim=64, block=16, table_blocks=8,
        seed=6,
    )  # fmt: skip
    out = decode_attention(*case, 60.0, split_size=64, backend=backend)
    assert relative_error(out, dense_fp64(*case, 60.0)) < 1e-5


@pytest.mark.parametrize("split", [64, None])
def test_bits_do_not_depend_on_batch_mates_or_table_width(device, backend, split):
    q, k, v, table, context = paged_case(
        device, torch.bfloat16, [150, 3, 64, 201, 96], heads=6, groups=2, dim=64, block=16,
        table_blocks=16, seed=7,
    )  # fmt: skip
    together = decode_attention(q, k, v, table, context, 0.125, split_size=split, backend=backend)
    for row in range(len(q)):
        blocks = -(-int(context[row]) // 16)
        alone = decode_attention(
            q[row : row + 1], k, v, table[row : row + 1, :blocks], context[row : row + 1], 0.125,
            split_size=split, backend=backend,
        )  # fmt: skip
        assert torch.equal(alone[0], together[row])


def test_head_major_cache_as_a_view_gives_the_same_bits(device, backend):
    q, k, v, table, context = paged_case(
        device, torch.float16, [70, 33], heads=4, groups=2, dim=64, block=16, table_blocks=5,
        seed=8,
    )  # fmt: skip
    k_view, v_view = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert not k_view.is_contiguous()
    expected = decode_attention(q, k, v, table, context, 0.125, backend=backend)
    got = decode_attention(q, k_view, v_view, table, context, 0.125, backend=backend)
    assert torch.equal(got, expected)


def test_strided_queries_and_empty_batch(device, backend):
    q, k, v, table, context = paged_case(
        device, torch.float32, [20, 5], heads=4, groups=2, dim=64, block=16, table_blocks=2, seed=9
    )
    fused = torch.cat((q, q + 1), dim=1)
    got = decode_attention(fused[:, :4], k, v, table, context, 0.125, backend=backend)
    assert torch.equal(got, decode_attention(q, k, v, table, context, 0.125, backend=backend))
    empty = decode_attention(q[:0], k, v, table[:0], context[:0], 0.125, backend=backend)
    assert empty.shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "width", "split", "window"),
    [
        (8, 2, 64, 64, None, None), (3, 3, 96, 96, 64, None), (10, 2, 64, 16, 64, None),
        (8, 2, 64, 64, None, 33), (3, 3, 96, 48, 64, 70),
    ],
)  # fmt: skip
def test_a_new_token_is_rotated_written_and_attended(
    device, backend, dtype, heads, groups, dim, width, split, window
):
    """As by the separate write, also where the new token is the first of a split."""
    contexts = [1, 64, 65, 0, 129, 100]
    q, k, v, table, context = paged_case(
        device, dtype, contexts, heads=heads, groups=groups, dim=dim, block=16, table_blocks=9,
        seed=width, window=window,
    )  # fmt: skip
    fused = torch.randn(len(q), groups, heads // groups + 2, dim).to(device, dtype)
    queries, k_new, v_new = fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]
    angles = rope_table(1e4 ** -(torch.arange(0, width, 2) / width).to(device), 140)
    apart = [k.clone(), v.clone()]
    position = (context.long() - 1).clamp(min=0)
    slots = torch.tensor(
        [int(table[row, (n - 1) // 16]) * 16 + (n - 1) % 16 if n else -1
         for row, n in enumerate(contexts)], device=device,
    )  # fmt: skip
    rotated, _ = rope_kv_write(
        queries, k_new, v_new, angles, position, *apart, slots, backend="torch"
    )
    new = NewToken(k_BGD=k_new, v_BGD=v_new, cos_sin_PR=angles)
    out = decode_attention(
        queries, k, v, table, context, 0.11, new=new, window=window, split_size=split,
        backend=backend,
    )  # fmt: skip
    for cache, expected in zip((k, v), apart, strict=True):
        torch.testing.assert_close(cache, expected, equal_nan=True)
        assert cache.isnan().equal(expected.isnan()), "nothing else is written"
    expected = dense_fp64(rotated, *apart, table, context, 0.11, window)
    assert relative_error(out, expected) < 2 * TOLERANCE[dtype]
    assert not out[3].any()


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (dict(k_BGD=torch.zeros(2, 1, 64)), r"must be \[2, 2, 64\]"),
        (dict(v_BGD=torch.zeros(2, 2, 64, dtype=torch.float16)), "must have q's"),
        (dict(cos_sin_PR=torch.zeros(9, 66)), "cos/sin table"),
    ],
)
def test_a_bad_new_token_is_named(new, message):
    good = dict(
        k_BGD=torch.zeros(2, 2, 64), v_BGD=torch.zeros(2, 2, 64), cos_sin_PR=torch.zeros(9, 64)
    )
    cache = torch.zeros(4, 16, 2, 64)
    table, context = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        decode_attention(
            torch.zeros(2, 4, 64), cache, cache, table, context, 0.1, new=NewToken(**good | new)
        )


BAD = {
    "not a multiple": dict(q=torch.zeros(2, 5, 64)),
    "head dimensions 32": dict(q=torch.zeros(2, 4, 32)),
    "power of two": dict(k=torch.zeros(4, 24, 2, 64), v=torch.zeros(4, 24, 2, 64)),
    "equal caches": dict(v=torch.zeros(4, 16, 1, 64)),
    "2 sequences need": dict(context=torch.zeros(3, dtype=torch.int32)),
    "share one floating dtype": dict(q=torch.zeros(2, 4, 64, dtype=torch.float16)),
    "contiguous": dict(q=torch.zeros(2, 4, 128)[..., ::2]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    good = dict(
        q=torch.zeros(2, 4, 64), k=torch.zeros(4, 16, 2, 64), v=torch.zeros(4, 16, 2, 64),
        table=torch.zeros(2, 2, dtype=torch.int32), context=torch.ones(2, dtype=torch.int32),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        decode_attention(*(good | BAD[message]).values(), 0.125)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graph_follows_growing_sequences(device):
    q, k, v, table, context = paged_case(
        device, torch.bfloat16, [700, 90, 0], heads=8, groups=2, dim=64, block=16, table_blocks=64,
        seed=10,
    )  # fmt: skip
    static = [x.clone() for x in (q, k, v, table, context)]
    decode_attention(*static, 0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*static, 0.125)
    for lengths in ([1, 90, 600], [64, 0, 1024]):
        fresh = paged_case(
            device, torch.bfloat16, lengths, heads=8, groups=2, dim=64, block=16, table_blocks=64,
            seed=sum(lengths),
        )  # fmt: skip
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        graph.replay()
        assert torch.equal(out, decode_attention(*fresh, 0.125))
        assert relative_error(out, dense_fp64(*fresh, 0.125)) < 6e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_agrees_with_torch_varlen_attention(device):
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    contexts = [700, 90, 1, 256]
    q, k, v, table, context = paged_case(
        device, torch.bfloat16, contexts, heads=8, groups=2, dim=64, block=256, table_blocks=4,
        seed=11,
    )  # fmt: skip
    out = decode_attention(q, k, v, table, context, 0.125)
    starts = torch.arange(len(contexts) + 1, device=device, dtype=torch.int32)
    cumulative = torch.nn.functional.pad(context.cumsum(0), (1, 0)).int()
    if "block_table" in inspect.signature(varlen).parameters:
        expected = varlen(
            q, k.nan_to_num(), v.nan_to_num(), starts, cumulative, 1, max(contexts), scale=0.125,
            enable_gqa=True, block_table=table.clamp(max=len(k) - 1),
            seqused_k=context,
        )  # fmt: skip
    else:
        tokens = [
            [c[table[r, : -(-n // 256)].long()].flatten(0, 1)[:n] for r, n in enumerate(contexts)]
            for c in (k, v)
        ]
        packed_k, packed_v = (torch.cat(t) for t in tokens)
        repeated_k, repeated_v = (x.repeat_interleave(4, dim=1) for x in (packed_k, packed_v))
        expected = varlen(
            q, repeated_k, repeated_v, starts, cumulative, 1, max(contexts), scale=0.125
        )  # fmt: skip
    assert relative_error(out, expected.double()) < 6e-3
