"""The memory of the paged KV cache on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor

from megatron_rl.generation.transfer import to_device
from megatron_rl.kernels.backend import use_triton
from megatron_rl.models.experts import FREE
from megatron_rl.models.gpt import ParallelModel


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Size of the KV cache on one rank.

    Attributes:
        choices: experts per token that are kept beside its keys and values; 0: none are.
    """

    blocks: int
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    choices: int = 0

    @classmethod
    def of(
        cls, model: ParallelModel, *, blocks: int, block_size: int, keep_routes: bool = False
    ) -> CacheShape:
        """The cache that `model`'s local layers need.

        Args:
            keep_routes: also which experts each token took (of a mixture of experts).
        """
        experts = model.arch.experts
        layers = sum(len(chunk.decoder.layers) for chunk in model.chunks)
        kv_heads = max(model.config.num_query_groups // model.groups.layout.tp, 1)
        return cls(
            blocks=blocks, block_size=block_size, layers=layers, kv_heads=kv_heads,
            head_dim=model.arch.head_dim, dtype=model.config.params_dtype,
            choices=experts.per_token if keep_routes and experts else 0,
        )  # fmt: skip

    def bytes_per_block(self) -> int:
        """Keys, values and routes of all local layers, in bytes."""
        numbers = 2 * self.kv_heads * self.head_dim
        per_token = numbers * self.dtype.itemsize + self.choices * torch.int16.itemsize
        return self.layers * self.block_size * per_token


class KVCache:
    """Keys and values `[blocks + 1, block_size, G, D]` of each local layer.

    The last block belongs to nobody: slot -1, which stands for no token, ends there. Where routes
    are kept, `routes` has `[(blocks + 1) · block_size, K]` of each layer, by slot like the keys:
    what shares, moves or computes again a token's keys does so with its experts.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        size = (shape.blocks + 1, shape.block_size, shape.kv_heads, shape.head_dim)
        # One allocation: freeing it gives training a region without holes.
        self._all = _zeros((2 * shape.layers, *size), shape.dtype, device)
        self.keys = list(self._all[: shape.layers])
        self.values = list(self._all[shape.layers :])
        self.routes: list[Tensor] | None = None
        if shape.choices:
            routes = (shape.layers, *size[:2], shape.choices)
            self._routes = _zeros(routes, torch.int16, device)
            self.routes = list(self._routes.flatten(1, 2))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks, (from, to). All are read before any is written."""
        if pairs:
            source, target = to_device(pairs, self._all.device).unbind(1)
            self._all[:, target] = self._all[:, source]
            if self.routes is not None:
                self._routes[:, target] = self._routes[:, source]

    def routes_of(self, slots: list[int]) -> Tensor:
        """int16 `[layers, tokens, K]`: experts of the tokens at these slots, FREE at slot -1."""
        slots_T = to_device(slots, self._routes.device, torch.int64)
        found_LTK = self._routes.flatten(1, 2)[:, slots_T]
        return torch.where(slots_T[None, :, None] >= 0, found_LTK, FREE)

    def kernels_fit(self, probe: Tensor) -> bool:
        """Whether our kernels serve this cache on the probe's device; else plain torch does."""
        size, dim = self.shape.block_size, self.shape.head_dim
        fits = size & (size - 1) == 0 and dim % 16 == 0 and dim <= 256
        return fits and use_triton("decode_attention", probe)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU from pages that the system zeroes when they are first touched: a cache that takes
    its whole budget costs no more than what is used of it."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(size)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on this rank's device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    ranks = max(torch.distributed.get_world_size(), 1)
    return psutil.virtual_memory().available // ranks
