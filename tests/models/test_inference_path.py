"""Layer: pure. What plain torch computes in generation, against float64 by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.models.attention import AttentionBatch, PagedCache, paged_attention
from megatron_rl.models.inference_forward import LEFT_ROWS, _linear


@pytest.mark.parametrize("rows", [1, 2, 17, LEFT_ROWS, LEFT_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_linear_of_few_and_of_many_rows(rows, biased):
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((rows, 48), (36, 48), (36,))
    )
    y = _linear(x, weight, bias if biased else None)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    again = _linear(y, weight[:, :36])  # its own output as the next input
    assert again.shape == (rows, 36)
    torch.testing.assert_close(
        again.double(), y.double() @ weight[:, :36].double().t(), rtol=1e-4, atol=1e-4
    )


def by_hand(q_LHD, k_KGD, v_KGD, scale, window):
    """Attention of the last L of K tokens, one query and head at a time, float64."""
    new, heads, _ = q_LHD.shape
    context, groups, _ = k_KGD.shape
    out = torch.zeros(q_LHD.shape, dtype=torch.float64)
    for i in range(new):
        stop = context - new + i + 1
        seen = slice(0 if window is None else max(stop - window, 0), stop)
        for h in range(heads):
            g = h // (heads // groups)
            weight = (k_KGD[seen, g].double() @ q_LHD[i, h].double() * scale).softmax(0)
            out[i, h] = weight @ v_KGD[seen, g].double()
    return out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "new, padding", [([1, 1, 1], 0), ([1, 1, 1], 2), ([4, 1, 7], 0), ([9, 2, 3], 3)], ids=str
)
def test_paged_attention(new, padding, window):
    generator = torch.Generator().manual_seed(sum(new) + padding)
    heads, groups, dim, size = 6, 2, 16, 4
    contexts = [n + before for n, before in zip(new, (0, 6, 11), strict=True)]
    blocks = [-(-c // size) for c in contexts]
    k_cache, v_cache = torch.randn(2, 3 * max(blocks) + 1, size, groups, dim, generator=generator)
    table = torch.randperm(3 * max(blocks), generator=generator).view(3, -1)
    for row, count in enumerate(blocks):
        table[row, count:] = -1
        if window is not None:  # what has left the window has no block any more
            table[row, : max(contexts[row] - new[row] - window + 1, 0) // size] = -1
    q = torch.randn(sum(new) + padding, heads, dim, generator=generator)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    cache = PagedCache(
        keys=[k_cache], values=[v_cache], block_table_BN=table.int(),
        context_B=torch.tensor(contexts).int(), max_context=max(contexts),
    )  # fmt: skip
    batch = AttentionBatch(
        positions_T=torch.zeros(len(q), dtype=torch.int64), lengths=new, cu_seqlens_B1=starts,
        cache=cache,
    )  # fmt: skip
    out = paged_attention(q, batch, k_cache, v_cache, 0.3, window)
    for row, context in enumerate(contexts):
        k, v = (x[table[row]].flatten(0, 1)[:context] for x in (k_cache, v_cache))
        rows = slice(starts[row], starts[row + 1])
        expected = by_hand(q[rows], k, v, 0.3, window)
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-4, atol=1e-5)
    assert len(out) == len(q) and not out[sum(new) :].any()
