"""RoPE fused with the paged KV write, against complex multiplication in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.kernels.rope_kv_write import rope_kv_write, rope_table

# fp32: angles up to 300 rad from fp32 frequencies are off by about 1e-5 rad.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
BLOCKS, BLOCK_SIZE = 6, 16


def inverse_frequencies(width):
    return 10000.0 ** -(torch.arange(0, width, 2) / width)


def rotated_fp64(x, positions, width):
    """Pairs (x_i, x_{i + width/2}) as complex numbers, times e^{i·position·frequency}."""
    x = x.double()
    half = width // 2
    angle = positions.double()[:, None] * inverse_frequencies(width).double().to(x.device)[None]
    turned = torch.complex(x[..., :half], x[..., half:width]) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, x[..., width:]), dim=-1)


def random_case(device, dtype, *, tokens, heads, groups, dim, seed):
    torch.manual_seed(seed)
    fused = torch.randn(tokens, (heads + 2 * groups) * dim).to(device, dtype)
    q, k, v = (
        part.unflatten(1, (-1, dim))
        for part in fused.split((heads * dim, groups * dim, groups * dim), dim=1)
    )
    positions = torch.randint(0, 300, (tokens,)).to(device)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:tokens].to(device)
    caches = [torch.randn(BLOCKS, BLOCK_SIZE, groups, dim).to(device, dtype) for _ in range(2)]
    return (q, k, v), positions, slots, caches


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "width"),
    [(8, 2, 64, 64), (3, 3, 96, 96), (4, 1, 128, 64), (10, 2, 64, 16)],
)
def test_rotates_and_writes(device, backend, dtype, heads, groups, dim, width):
    (q, k, v), positions, slots, caches = random_case(
        device, dtype, tokens=9, heads=heads, groups=groups, dim=dim, seed=dim + width
    )
    slots[3] = slots[7] = -1
    before = [cache.clone() for cache in caches]
    table = rope_table(inverse_frequencies(width).to(device), 300)
    q_out, k_out = rope_kv_write(q, k, v, table, positions, *caches, slots, backend=backend)
    for out, source in ((q_out, q), (k_out, k)):
        expected = rotated_fp64(source, positions, width)
        assert ((out.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
        assert (out.double() - expected).abs().max() < 10 * TOLERANCE[dtype]
        assert torch.equal(out[..., width:], source[..., width:])
    for cache, old, written in zip(caches, before, (k_out, v), strict=True):
        flat, untouched = cache.flatten(0, 1), torch.ones(len(old.flatten(0, 1)), dtype=torch.bool)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(flat[slot], written[token])
                untouched[slot] = False
        assert torch.equal(flat[untouched.to(device)], old.flatten(0, 1)[untouched.to(device)])


def test_equals_hugging_face_llama_in_fp32(device, backend):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    (q, k, v), positions, slots, caches = random_case(
        device, torch.float32, tokens=5, heads=4, groups=2, dim=64, seed=1
    )
    table = rope_table(inverse_frequencies(64).to(device), 300)
    q_out, k_out = rope_kv_write(q, k, v, table, positions, *caches, slots, backend=backend)
    cos, sin = (half.repeat(1, 2)[None] for half in table[positions].chunk(2, dim=-1))
    q_hf, k_hf = llama.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    torch.testing.assert_close(q_out, q_hf[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(k_out, k_hf[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_scores_depend_on_distance_alone(device, backend):
    (q, k, v), _, slots, caches = random_case(
        device, torch.float32, tokens=2, heads=1, groups=1, dim=64, seed=2
    )
    table = rope_table(inverse_frequencies(64).to(device), 300)

    def score(first, second):
        positions = torch.tensor([first, second], device=device)
        q_out, k_out = rope_kv_write(q, k, v, table, positions, *caches, slots, backend=backend)
        return (q_out[0] * k_out[1]).sum()

    torch.testing.assert_close(score(7, 3), score(204, 200), rtol=1e-4, atol=1e-4)
    assert (score(7, 3) - score(7, 5)).abs() > 1e-2


def test_head_major_cache_view_and_no_tokens(device, backend):
    (q, k, v), positions, slots, caches = random_case(
        device, torch.float32, tokens=4, heads=2, groups=2, dim=64, seed=3
    )
    table = rope_table(inverse_frequencies(64).to(device), 300)
    views = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    rope_kv_write(q, k, v, table, positions, *caches, slots, backend=backend)
    rope_kv_write(q, k, v, table, positions, *views, slots, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(caches, views, strict=True))
    q_out, k_out = rope_kv_write(
        q[:0], k[:0], v[:0], table, positions[:0], *caches, slots[:0], backend=backend
    )
    assert q_out.shape == (0, 2, 64) and k_out.shape == (0, 2, 64)


def test_queries_fused_by_kv_head(device, backend):
    """The layout of Megatron's fused output: each KV head's queries, its key, its value."""
    torch.manual_seed(4)
    _, positions, slots, caches = random_case(
        device, torch.float32, tokens=4, heads=6, groups=2, dim=64, seed=4
    )
    fused = torch.randn(4, 2, 5, 64, device=device)
    q, k, v = fused[:, :, :3], fused[:, :, 3], fused[:, :, 4]
    table = rope_table(inverse_frequencies(64).to(device), 300)
    apart = [cache.clone() for cache in caches]
    got = rope_kv_write(q, k, v, table, positions, *caches, slots, backend=backend)
    want = rope_kv_write(
        q.flatten(1, 2), k.contiguous(), v.contiguous(), table, positions, *apart, slots,
        backend=backend,
    )  # fmt: skip
    for a, b in zip((*got, *caches), (*want, *apart), strict=True):
        assert torch.equal(a, b)


def test_table_scaling_multiplies_both_halves():
    plain, scaled = (rope_table(inverse_frequencies(32), 10, factor) for factor in (1.0, 1.5))
    torch.testing.assert_close(scaled, plain * 1.5)
    assert torch.equal(plain[0], torch.tensor([1.0] * 16 + [0.0] * 16))


BAD = {
    "equal k, v": dict(v=torch.zeros(3, 1, 64)),
    r"or \[T, G, H/G, D\]": dict(q=torch.zeros(3, 1, 4, 64)),
    "not a multiple": dict(q=torch.zeros(3, 3, 64)),
    r"must both be \[blocks, S, 2, 64\]": dict(k_cache=torch.zeros(4, 16, 1, 64)),
    "R even and at most 64": dict(table=torch.zeros(9, 66)),
    "cos/sin table must be fp32": dict(table=torch.zeros(9, 64, dtype=torch.float16)),
    "as many positions and slots": dict(slots=torch.zeros(2, dtype=torch.int64)),
    "share one dtype": dict(q=torch.zeros(3, 4, 64, dtype=torch.float16)),
    "caches of two dtypes": dict(v_cache=torch.zeros(4, 16, 2, 64, dtype=torch.float16)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    index = torch.zeros(3, dtype=torch.int64)
    good = dict(
        q=torch.zeros(3, 4, 64), k=torch.zeros(3, 2, 64), v=torch.zeros(3, 2, 64),
        table=torch.zeros(9, 64), positions=index, k_cache=torch.zeros(4, 16, 2, 64),
        v_cache=torch.zeros(4, 16, 2, 64), slots=index,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        rope_kv_write(*(good | BAD[message]).values())
