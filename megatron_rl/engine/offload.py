"""Model weights and optimizer states that live in host memory between their uses.

What is offloaded are whole storages: their bytes are copied to host memory and the storage is
resized to 0, so that the device memory is free and every view (parameters, Megatron's buffers,
optimizer shards) stays bound and comes alive again with it. On a CPU-only run the same happens
between two buffers of host memory, so that a use while offloaded raises there, too.

Copies run on a side stream in buckets, or on threads where there is no GPU or no pinned memory, and
are waited for only when something is used.

Units: bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.config.training import OffloadSettings
from megatron_rl.engine.optimizer import Trainable
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.runtime import log

BUCKET_BYTES = 64 * 2**20


@dataclass(slots=True)
class _Piece:
    """One storage, and the host memory that keeps its bytes."""

    storage: torch.UntypedStorage
    device_bytes: Tensor
    host_bytes: Tensor

    @property
    def nbytes(self) -> int:
        return self.host_bytes.nbytes


class Offloaded:
    """A set of tensors that is either on the device, arriving, or in host memory.

    Args:
        name: for messages.
        tensors: gives the tensors; asked at every offload, since optimizers make theirs late.
        settings: pinned memory and threads.
        frozen: the tensors never change, so that they are copied to the host once.
        settle: called before the tensors leave, to finish what is still writing to them.
    """

    def __init__(
        self, name: str, tensors: Callable[[], Iterable[Tensor]], settings: OffloadSettings, *,
        frozen: bool = False, settle: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.frozen = name, frozen
        self.state: Literal["device", "arriving", "host"] = "device"
        self._tensors, self._settings, self._settle = tensors, settings, settle
        self._pieces: dict[int, _Piece] = {}
        self._copies: _Copies | None = None

    @property
    def device_bytes(self) -> int:
        """Device memory held at this moment."""
        return sum(piece.storage.nbytes() for piece in self._pieces.values())

    @property
    def host_bytes(self) -> int:
        """Host memory held; it is kept for the next time."""
        return sum(piece.nbytes for piece in self._pieces.values())

    def offload(self) -> None:
        """Copies what may have changed to the host and frees the device memory."""
        if self.state == "host":
            return
        self.load()
        if self._settle is not None:
            self._settle()
        copied = set(self._pieces) if self.frozen else set()
        self._find_pieces()
        self._copy([
            (piece.host_bytes, piece.device_bytes)
            for key, piece in self._pieces.items() if key not in copied
        ])  # fmt: skip
        self._wait()
        for piece in self._pieces.values():
            piece.storage.resize_(0)
        self.state = "host"

    def prefetch(self) -> None:
        """Starts to bring everything back; returns at once where copies are asynchronous."""
        if self.state != "host":
            return
        for piece in self._pieces.values():
            piece.storage.resize_(piece.nbytes)
        self._copy([(p.device_bytes, p.host_bytes) for p in self._pieces.values()])
        self.state = "arriving"

    def load(self) -> None:
        """Returns when everything may be used."""
        self.prefetch()
        if self.state == "arriving":
            self._wait()
            self.state = "device"

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if pairs:  # an optimizer has no states before its first step
            self._copies.start(pairs)

    def _wait(self) -> None:
        if self._copies is not None:
            self._copies.wait()

    def guard(self, model: ParallelModel) -> None:
        """Makes a forward pass of `model` raise while its weights are away."""

        def check(module: torch.nn.Module, args: Any) -> None:
            if self.state != "device":
                raise RuntimeError(f"{self.name} is used while it is offloaded to host memory")

        for chunk in model.chunks:
            chunk.register_forward_pre_hook(check)

    def _find_pieces(self) -> None:
        """The storages of this moment; those that are gone give their host memory back."""
        found: dict[int, _Piece] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            known = self._pieces.get(key)
            if key in found or size == 0:
                continue
            if known is not None and known.nbytes == size:
                found[key] = known
                continue
            if self._copies is None:
                self._copies = _Copies(tensor.device, self._settings)
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found[key] = _Piece(storage, view, self._copies.host_buffer(size))
        self._pieces = found


class _Copies:
    """Copies between device and host in buckets; one batch at a time."""

    def __init__(self, device: torch.device, settings: OffloadSettings) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._pinned = settings.pin_memory and on_gpu
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._threads = None if self._pinned else ThreadPoolExecutor(settings.num_threads)
        self._pending: list[Future] = []

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Begins to copy (to, from) pairs of flat byte tensors."""
        if self._stream is not None:
            # What was written, and memory that was freed, before this moment must be seen.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for target, source in pairs:
            for first in range(0, source.nbytes, BUCKET_BYTES):
                part = slice(first, first + BUCKET_BYTES)
                if self._threads is None:
                    self._copy(target[part], source[part])
                else:
                    self._pending.append(
                        self._threads.submit(self._copy, target[part], source[part])
                    )

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with torch.no_grad(), self._on_side_stream():
            target.copy_(source, non_blocking=self._pinned)

    def _on_side_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Orders everything after this behind the copies."""
        for future in self._pending:
            future.result()
        self._pending = []
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def weights_of(model: ParallelModel) -> list[Tensor]:
    """The tensors that hold a model's weights."""
    return [parameter.data for _, parameter in model.named_parameters()]


def optimizer_tensors(trainable: Trainable) -> list[Tensor]:
    """Main parameters and optimizer states that are not part of the weights' storages."""
    weights = {x.untyped_storage()._cdata for x in weights_of(trainable.model)}
    device, found = trainable.model.device, []
    for part in trainable.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                states = part.optimizer.state.get(main, {}).values()
                found += [main, *(x for x in states if isinstance(x, Tensor) and x.numel() > 1)]
    return [
        x for x in found if x.device == device and x.untyped_storage()._cdata not in weights
    ]  # fmt: skip


def warn_about_pageable_memory(device: torch.device, nbytes: int = 128 * 2**20) -> None:
    """Says once what `pin_memory: false` costs: both speeds, measured now."""
    if device.type != "cuda":
        log.warning("pin_memory: false has no effect without a GPU: all memory is host memory")
        return
    speeds = []
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for pinned in (True, False):
        target = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        target.copy_(source)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        speeds.append(nbytes / (time.perf_counter() - start) / 1e9)
    log.warning(
        "pin_memory: false copies at %.1f GB/s, pinned memory at %.1f GB/s", speeds[1], speeds[0]
    )
