"""Loads and calls the compiled kernels (see build.py) through ctypes, which releases the GIL."""

import ctypes
import functools

import torch

from . import build
from .build import BuildError

_DTYPES = {torch.float32: 1, torch.bfloat16: 2}


@functools.cache
def _cpu_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build.cpu_library()))


@functools.cache
def _cuda_library(capability: tuple[int, int]) -> ctypes.CDLL:
    return ctypes.CDLL(str(build.cuda_library(capability)))


def load_cpu() -> None:
    """Make the CPU kernels ready; raises `BuildError` or ``OSError`` where that is impossible."""
    _cpu_library()


def load_cuda(device: torch.device) -> None:
    """Make the kernels for this GPU ready; raises `BuildError` or ``OSError``."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise BuildError(f"compute capability {capability} is below 8.0")
    _cuda_library(capability)


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _dtype(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else _DTYPES[tensor.dtype]


def _row_stride(tensor: torch.Tensor | None) -> ctypes.c_int64:
    return ctypes.c_int64(0 if tensor is None else tensor.stride(0))


def _rounding(seed: int | None) -> tuple[int, ctypes.c_uint32]:
    return int(seed is not None), ctypes.c_uint32(seed or 0)


def _call(name: str, device: torch.device, arguments: list) -> None:
    """Run one kernel where the tensors are: on the current CUDA stream, or on this thread."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        getattr(_cpu_library(), f"{name}_cpu")(*arguments, threads)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    library = _cuda_library(torch.cuda.get_device_capability(index))
    stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
    error = getattr(library, f"{name}_cuda")(*arguments, index, stream)
    if error:
        raise RuntimeError(f"{name}: CUDA error {error} at launch")


def quantize(
    x_RC: torch.Tensor,
    q_RC: torch.Tensor,
    scale_RK: torch.Tensor,
    block: int,
    residual_RC: torch.Tensor | None = None,
    seed: int | None = None,
) -> None:
    """See `reference.quantize`."""
    rows, columns = x_RC.shape
    if rows == 0 or columns == 0:
        return
    arguments = [_pointer(x_RC), _dtype(x_RC), _row_stride(x_RC)]
    arguments += [_pointer(q_RC), _row_stride(q_RC), _pointer(scale_RK), _row_stride(scale_RK)]
    arguments += [_pointer(residual_RC), _dtype(residual_RC), _row_stride(residual_RC)]
    arguments += [ctypes.c_int64(rows), ctypes.c_int64(columns), block, *_rounding(seed)]
    _call("int8_quantize", x_RC.device, arguments)


def dequantize(
    q_RC: torch.Tensor, scale_RK: torch.Tensor, block: int, out_RC: torch.Tensor
) -> None:
    """See `reference.dequantize`."""
    rows, columns = q_RC.shape
    if rows == 0 or columns == 0:
        return
    arguments = [_pointer(q_RC), _row_stride(q_RC), _pointer(scale_RK), _row_stride(scale_RK)]
    arguments += [_pointer(out_RC), _dtype(out_RC), _row_stride(out_RC)]
    arguments += [ctypes.c_int64(rows), ctypes.c_int64(columns), block]
    _call("int8_dequantize", q_RC.device, arguments)


def reduce(
    q_NC: torch.Tensor,
    scale_NK: torch.Tensor,
    block: int,
    *,
    out_C: torch.Tensor | None = None,
    q_C: torch.Tensor | None = None,
    scale_K: torch.Tensor | None = None,
    residual_C: torch.Tensor | None = None,
    factor: float = 1.0,
    seed: int | None = None,
) -> None:
    """See `reference.reduce`."""
    ranks, columns = q_NC.shape
    if columns == 0:
        return
    arguments = [_pointer(q_NC), _row_stride(q_NC), _pointer(scale_NK), _row_stride(scale_NK)]
    arguments += [ctypes.c_int64(ranks), ctypes.c_int64(columns), block]
    arguments += [_pointer(out_C), _dtype(out_C), _pointer(q_C), _pointer(scale_K)]
    arguments += [_pointer(residual_C), _dtype(residual_C), ctypes.c_float(factor)]
    arguments += _rounding(seed)
    _call("int8_reduce", q_NC.device, arguments)
