"""Block-copy kernel against plain indexing, on a GPU, or on a CPU through Triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels.reshard import BlockCopy, CopyTable, copy_blocks, copy_blocks_reference
from megatron_rl.kernels.reshard.table import LANES, VECTOR

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_bytes(generator: np.random.Generator, n: int) -> torch.Tensor:
    return torch.from_numpy(generator.integers(0, 256, n, dtype=np.uint8)).to(DEVICE)


def random_copies(seed: int, count: int, unit: int) -> tuple[list[BlockCopy], list[torch.Tensor]]:
    """Blocks of random shape from random tensors into disjoint parts of one poisoned buffer."""
    generator = np.random.default_rng(seed)
    shapes = [
        (int(generator.integers(1, 9)), int(generator.integers(1, 40)) * unit) for _ in range(count)
    ]
    total = sum(rows * (row_bytes + unit) + unit for rows, row_bytes in shapes)
    target = torch.full((total,), 0xA5, dtype=torch.uint8, device=DEVICE)
    copies, offset = [], 0
    for rows, row_bytes in shapes:
        src_stride = row_bytes + int(generator.integers(0, 4)) * unit
        dst_stride = row_bytes + int(generator.integers(0, 2)) * unit
        lead = int(generator.integers(0, 3)) * unit
        source = random_bytes(generator, lead + rows * src_stride)
        copies.append(
            BlockCopy(source, target, lead, offset, rows, row_bytes, src_stride, dst_stride)
        )
        offset += rows * dst_stride + int(generator.integers(0, 2)) * unit
    return copies, [target]


def expected_target(copies: list[BlockCopy], poisoned: torch.Tensor) -> torch.Tensor:
    out = poisoned.cpu().numpy().copy()
    for c in copies:
        for row in range(c.rows):
            src, dst = c.src_offset + row * c.src_stride, c.dst_offset + row * c.dst_stride
            out[dst : dst + c.row_bytes] = c.src.cpu().numpy()[src : src + c.row_bytes]
    return torch.from_numpy(out).to(DEVICE)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@given(seed=st.integers(0, 2**31), unit=st.sampled_from([1, 2, 8, 16, 32]))
@settings(max_examples=15, deadline=None)
def test_every_byte_lands_and_no_other_is_touched(backend, seed, unit):
    """Random blocks, aligned or not: equal to byte-wise indexing, gaps keep their poison."""
    copies, (target,) = random_copies(seed, 6, unit)
    want = expected_target(copies, target)
    copy_blocks(CopyTable(copies, lanes=32), backend)
    assert torch.equal(target, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_large_blocks_fill_several_tiles(dtype):
    """A long run and a tall, narrow block, both over a tile; typed tensors, not bytes."""
    long = torch.randn(3 * LANES * VECTOR // 4 + 8, device=DEVICE).to(dtype)
    tall = torch.randn(700, 24, device=DEVICE).to(dtype)
    long_out, tall_out = torch.zeros_like(long), torch.zeros(700, 8, dtype=dtype, device=DEVICE)
    size = long.element_size()
    copies = [
        BlockCopy(long, long_out, 0, 0, 1, long.nbytes, long.nbytes, long.nbytes),
        BlockCopy(tall, tall_out, 16 * size, 0, 700, 8 * size, 24 * size, 8 * size),
    ]
    copy_blocks(CopyTable(copies), "triton")
    assert torch.equal(long_out, long)
    assert torch.equal(tall_out, tall[:, 16:])


def test_a_run_can_be_repeated_after_the_source_changed():
    """The table holds addresses, not values."""
    source, target = torch.randn(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    table = CopyTable([BlockCopy(source, target, 0, 0, 1, 256, 256, 256)])
    for _ in range(2):
        source.normal_()
        copy_blocks(table, "triton")
        assert torch.equal(source, target)


def test_a_moved_tensor_is_noticed():
    """Storage released and taken again gives a new address; the old table must not be used."""
    source, target = torch.randn(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    table = CopyTable([BlockCopy(source, target, 0, 0, 1, 256, 256, 256)])
    target.set_(torch.zeros(64, device=DEVICE).untyped_storage())
    assert table.stale()
    with pytest.raises(ValueError, match="moved"):
        copy_blocks(table)


def test_empty_table_does_nothing():
    copy_blocks(CopyTable([]))
    copy_blocks_reference(CopyTable([]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 5}, "covers bytes"),
        ({"dst_offset": 8}, "covers bytes"),
        ({"src_offset": -1}, "covers bytes"),
        ({"row_bytes": 0}, "empty"),
        ({"src_stride": 8}, "overlap"),
    ],
)
def test_blocks_outside_a_tensor_are_refused(change, message):
    fields = dict(
        src=torch.zeros(16), dst=torch.zeros(16), src_offset=0, dst_offset=0,
        rows=4, row_bytes=16, src_stride=16, dst_stride=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        CopyTable([BlockCopy(**{**fields, **change})])


def test_strided_tensors_are_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        CopyTable([BlockCopy(torch.zeros(4, 4).t(), torch.zeros(16), 0, 0, 1, 64, 64, 64)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("unit", [1, 2, 16])
def test_gpu_copies_equal_byte_wise_indexing(unit):
    """Compiled kernel, many blocks in one launch: the same bytes, untouched gaps."""
    copies, (target,) = random_copies(seed=unit, count=300, unit=unit)
    want = expected_target(copies, target)
    copy_blocks(CopyTable(copies), "triton")
    assert torch.equal(target, want)
