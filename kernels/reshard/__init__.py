"""Copy many slices of many tensors in one launch: pack into a send buffer, unpack out of one.

A resharding plan cuts tensors into two-dimensional blocks of bytes (rows of some width, a stride on
either side). Packing and unpacking are the same operation on such blocks, and so is copying a
rank's own shard into its place:

    table = CopyTable([BlockCopy(weight, send_buffer, ...), ...])   # once
    copy_blocks(table)                                              # one launch, every time

`table.py` turns blocks into a device-side descriptor table, `kernel.py` is the Triton kernel,
`reference.py` the plain torch version that defines the result. A CUDA C++ kernel with 16-byte
streaming accesses over the same table was no faster than the spread of repeated runs (H200, 16 GB:
8.08 against 8.09 ms), so there is none.
"""

from .copy import copy_blocks
from .reference import copy_blocks_reference
from .table import BlockCopy, CopyTable

__all__ = ["BlockCopy", "CopyTable", "copy_blocks", "copy_blocks_reference"]
