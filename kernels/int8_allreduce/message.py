"""Layout of an int8 message: how a row of values and its scales lie in bytes.

Shape suffixes: R rows (one per peer), C columns (values of a row), K blocks of a row, M bytes of a
row's message.

A row of C values goes out as ``[C int8 | padding | K fp32 scales | padding]``. Both parts start on
16 bytes, so that kernels can use wide accesses whatever C is; when C is a multiple of four blocks
there is no padding at all and a value costs exactly ``1 + 4 / block`` bytes.
"""

import torch

BLOCK_SIZES = (128, 256, 512)
ALIGNMENT = 16
MAX_SCALE = 2.67938839e36  # the largest fp32 scale whose 127-fold is still finite


def check_block_size(block: int) -> None:
    """Raise ``ValueError`` unless a kernel for this block size exists."""
    if block not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ValueError(f"block_size is {block}: the int8 kernels take {sizes}; choose one")


def num_blocks(columns: int, block: int) -> int:
    """Scales in a row of ``columns`` values; the last block may be short."""
    return -(-columns // block)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def message_bytes(columns: int, block: int) -> int:
    """Bytes on the wire for one row of ``columns`` values."""
    return _padded(columns) + _padded(4 * num_blocks(columns, block))


def message_views(
    message_RM: torch.Tensor, columns: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (int8 values [R, C], fp32 scales [R, K]) into messages (uint8 [R, M])."""
    start = _padded(columns)
    stop = start + 4 * num_blocks(columns, block)
    q_RC = message_RM[:, :columns].view(torch.int8)
    scale_RK = message_RM[:, start:stop].view(torch.float32)
    return q_RC, scale_RK
