"""Block-wise int8 for gradients on the wire: quantise, reduce over ranks, dequantise.

Four implementations with the same bits: CUDA C++, Triton, C++ for CPUs, and plain torch, which is
the definition (`reference`). `select_backend` picks the fastest that works on a device.
"""

import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import native, reference
from .build import BuildError
from .message import BLOCK_SIZES, check_block_size, message_bytes, message_views, num_blocks

__all__ = [
    "BLOCK_SIZES",
    "Backend",
    "check_block_size",
    "message_bytes",
    "message_views",
    "num_blocks",
    "reference",
    "select_backend",
]

logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    """One implementation; the three functions have the signatures of `reference`."""

    name: str
    quantize: Callable[..., None]
    reduce: Callable[..., None]
    dequantize: Callable[..., None]


def _torch(device: torch.device) -> Backend:
    return Backend("torch", reference.quantize, reference.reduce, reference.dequantize)


def _triton(device: torch.device) -> Backend:
    from . import kernel

    return Backend("triton", kernel.quantize, kernel.reduce, kernel.dequantize)


def _cuda(device: torch.device) -> Backend:
    native.load_cuda(device)
    return Backend("cuda", native.quantize, native.reduce, native.dequantize)


def _cpp(device: torch.device) -> Backend:
    native.load_cpu()
    return Backend("cpp", native.quantize, native.reduce, native.dequantize)


_MAKERS = {"cuda": _cuda, "triton": _triton, "cpp": _cpp, "torch": _torch}
_ORDER = {"cuda": ("triton", "cuda", "torch"), "cpu": ("cpp", "torch")}
_announced: set[str] = set()


def select_backend(device: torch.device | str, name: str | None = None) -> Backend:
    """The fastest implementation for ``device``, or the named one.

    Args:
        device: where the gradients are, ``cpu`` or ``cuda``.
        name: ``cuda``, ``triton``, ``cpp`` or ``torch`` to insist on one.

    Raises:
        ValueError: for an unknown name. A named implementation that cannot be built raises why.
    """
    device = torch.device(device)
    if name is not None:
        if name not in _MAKERS:
            raise ValueError(f"int8 backend is {name!r}; choose one of {', '.join(_MAKERS)}")
        return _MAKERS[name](device)
    refused: list[str] = []
    for candidate in _ORDER.get(device.type, ("torch",)):
        if candidate == "triton" and importlib.util.find_spec("triton") is None:
            refused.append("triton: not installed")
            continue
        try:
            backend = _MAKERS[candidate](device)
        except (BuildError, OSError) as error:
            refused.append(f"{candidate}: {error}")
            continue
        _announce(f"int8 kernels on {device.type}: {candidate}", refused)
        return backend
    raise AssertionError("the torch implementation always loads")


def _announce(message: str, refused: list[str]) -> None:
    if message not in _announced:
        _announced.add(message)
        logger.info("%s%s", message, f" ({'; '.join(refused)})" if refused else "")
