"""The one place that lets Megatron-Core run without a GPU.

Megatron-Core calls `torch.cuda` for the current device, streams, events, memory figures and random
state, and creates tensors with `device="cuda"`. `enable()` answers all of these with the CPU, so
that tensor, pipeline and data parallel code runs on gloo exactly as written. It does nothing where
a GPU is present, and nothing else of this project patches anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_mode: TorchFunctionMode | None = None


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _FactoriesOnCpu(TorchFunctionMode):
    """Sends `device="cuda"` of tensor factories and `Tensor.to` to the CPU."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        elif func is torch.Tensor.to and any(_is_cuda(a) for a in args):
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
        return func(*args, **kwargs)


class _Stream:
    """A stream on a device that runs everything in order: waiting is free."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        pass


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type()` names the CUDA type: Megatron's distributed optimizer compares with it."""
    if dtype is None:
        return f"torch.cuda.{_TYPE_NAMES.get(self.dtype, self.dtype)}"
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return _original_type(self, dtype, *args, **kwargs)


_original_type = torch.Tensor.type
_TYPE_NAMES = {
    torch.float32: "FloatTensor", torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor",
}  # fmt: skip


def enable() -> bool:
    """Redirects CUDA calls to the CPU where there is no GPU; safe to call many times.

    Returns:
        True when the redirection is active, False on a machine with a GPU.
    """
    global _mode
    if torch.cuda.is_available():
        return False
    if _mode is not None:
        return True
    stream = _Stream()
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "synchronize": lambda device=None: None,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda s=None: contextlib.nullcontext(),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "FloatTensor": torch.FloatTensor,
        "IntTensor": torch.IntTensor,
        "LongTensor": torch.LongTensor,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]
    torch.cuda.random.set_rng_state = replacements["set_rng_state"]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = _tensor_type
    _mode = _FactoriesOnCpu()
    _mode.__enter__()
    return True
