"""The one entry point: run a table on the fastest path its device has."""

from __future__ import annotations

from ..backend import use_triton
from .reference import copy_blocks_reference
from .table import CopyTable


def copy_blocks(table: CopyTable, backend: str = "auto") -> None:
    """Run every copy of a table, in any order, on the current stream.

    Args:
        table: the copies; an empty table does nothing.
        backend: "auto", "triton" or "torch" (see `kernels/backend`).

    Raises:
        ValueError: a backend that cannot run here, or a table whose tensors have moved.
    """
    if not table.copies:
        return
    if table.stale():
        raise ValueError("a tensor of the copy table has moved in memory: build the table again")
    if use_triton("reshard", table.copies[0].dst, backend):
        from .kernel import copy_blocks_triton

        copy_blocks_triton(table)
    else:
        copy_blocks_reference(table)
