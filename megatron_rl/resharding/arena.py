"""Memory that a resharding allocates, kept between uses or really given back.

Everything lives in one flat byte tensor, so that giving it back is one call, the amount is one
number, and tensors bound to it (parameters of a generation model, say) stay bound: they are views
that come alive again with the storage. While it is released, a linear layer, an embedding or an
index that reads one raises; torch's element-wise kernels do not check, so keep them off.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

ALIGNMENT = 256
"""Bytes; what cuBLAS and the tensor memory accelerator like best for the start of a matrix."""


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """One flat allocation and named tensors in it.

    Args:
        layout: (shape, dtype) of every tensor by name.
        device: where it lives.
    """

    def __init__(
        self, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
        self.nbytes = sum(align(size) for size in sizes.values())
        self._flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self.tensors: dict[str, torch.Tensor] = {}
        offset = 0
        for name, (shape, dtype) in layout.items():
            piece = self._flat[offset : offset + sizes[name]]
            self.tensors[name] = piece.view(dtype).view(shape)
            offset += align(sizes[name])

    @property
    def allocated(self) -> bool:
        return self._flat.untyped_storage().nbytes() == self.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes held at this moment."""
        return self._flat.untyped_storage().nbytes()

    def allocate(self) -> None:
        """Take the memory (again); the contents are undefined."""
        if not self.allocated:
            self._flat.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        """Give the memory back; the tensors stay bound, without contents."""
        self._flat.untyped_storage().resize_(0)
