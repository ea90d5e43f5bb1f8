"""Plain torch version of the block copy: one strided `copy_` per block."""

from __future__ import annotations

import torch

from .table import BlockCopy, CopyTable


def copy_blocks_reference(table: CopyTable) -> None:
    """Run every copy of a table, one after the other."""
    for copy in table.copies:
        target = _view(copy.dst, copy.dst_offset, copy.dst_stride, copy)
        target.copy_(_view(copy.src, copy.src_offset, copy.src_stride, copy))


def _view(tensor: torch.Tensor, offset: int, stride: int, copy: BlockCopy) -> torch.Tensor:
    """The block's bytes as uint8 (rows, row_bytes)."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    start = flat.storage_offset() + offset
    return flat.as_strided((copy.rows, copy.row_bytes), (stride, 1), start)
