"""Layer: pure. Every element of a tensor is written once and read by all that hold it."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.checkpoint.cuts import cut_of, pieces, rectangles
from megatron_rl.convert.names import Replicated, all_rules
from megatron_rl.models.architecture import Architecture, Rope


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=2), st.data())
def test_rectangles_cover_a_flat_range_in_order(shape, data):
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    found = rectangles(tuple(shape), start, stop)
    assert len(found) <= 3
    parts = [
        whole[tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))].flatten()
        for offset, length in found
    ]
    covered = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
    assert covered.tolist() == list(range(start, stop))


def architecture(heads, kv_heads, vocab) -> Architecture:
    return Architecture(
        family="llama", hidden=6, layers=1, heads=heads, kv_heads=kv_heads, head_dim=2, ffn=12,
        vocab=vocab, tied=False, norm_eps=1e-5, max_positions=32, rope=Rope(), qkv_bias=True,
        qk_norm=True,
    )  # fmt: skip


class Whole:
    """A tensor in a file."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getitem__(self, index):
        return self.tensor[index]

    def get_shape(self):
        return list(self.tensor.shape)


def shards_of(rule, arch, tp):
    """All ranks' parameters, cut by the conversion's own rule from the same random tensors."""
    generator = torch.Generator().manual_seed(0)
    files = {
        name: Whole(torch.randn(shape or (arch.hidden,), generator=generator))
        for name, shape in rule.shapes(arch).items()
    }
    return [rule.shard(files.__getitem__, arch, tp, rank) for rank in range(tp)]


@pytest.mark.parametrize("heads, kv_heads, vocab", [(6, 6, 12), (3, 3, 7), (6, 2, 11), (4, 1, 8)])
@pytest.mark.parametrize("tp, dp", [(1, 1), (1, 3), (2, 2), (2, 5), (3, 1), (4, 3)])
@pytest.mark.parametrize("new_tp", [1, 2, 3])
def test_another_layout_reads_the_same_whole_tensor(heads, kv_heads, vocab, tp, dp, new_tp):
    """Flat ranges written by tp × dp ranks, read whole by new_tp ranks, give the rule's shards."""
    arch = architecture(heads, kv_heads, vocab)
    if not all(_fits(arch, n) for n in (tp, new_tp)):
        pytest.skip("the architecture can't be cut that way")
    for name, rule in all_rules(arch, head="lm").items():
        old, new = shards_of(rule, arch, tp), shards_of(rule, arch, new_tp)
        store, count = None, None
        for rank, shard in enumerate(old):
            cut = cut_of(rule, arch, tuple(shard.shape), tp=tp, rank=rank)
            store = torch.full(cut.shape, torch.nan) if store is None else store
            count = torch.zeros(cut.shape) if count is None else count
            if cut.replicated and rank > 0:
                continue
            flat, share = shard.flatten(), -(-shard.numel() // dp)
            for part in range(dp):
                held = flat[part * share : (part + 1) * share]
                for piece in pieces(cut, held, min(part * share, flat.numel())):
                    at = _slices(piece)
                    store[at] = piece.data
                    count[at] += 1
        assert (count == 1).all(), f"{name} is not written exactly once"
        for rank, want in enumerate(new):
            got = torch.zeros_like(want)
            cut = cut_of(rule, arch, tuple(want.shape), tp=new_tp, rank=rank)
            for piece in pieces(cut, got.view(-1), 0):
                piece.data.copy_(store[_slices(piece)])
            assert torch.equal(got, want), f"{name} on rank {rank} of {new_tp}"
            assert cut.padded or isinstance(rule, Replicated) or (got != 0).all()


def _slices(piece):
    sizes = piece.data.shape
    return tuple(slice(o, o + n) for o, n in zip(piece.offset, sizes, strict=True))


def _fits(arch, tp):
    try:
        arch.check_layout(tp=tp, pp=1, vpp=1, name="the model")
    except ValueError:
        return False
    return True
