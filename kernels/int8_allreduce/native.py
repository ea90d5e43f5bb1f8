"""Builds, loads and calls the C++ (CPU) and CUDA kernels in ``csrc/``.

The sources need no torch headers: a plain C interface called through ctypes compiles in seconds
with g++, works with any torch version, and releases the GIL while it runs.

A library is built on first use, by one process while the others of the machine wait at a file
lock, into ``$MEGATRON_RL_KERNEL_CACHE`` (default ``~/.cache/megatron_rl/kernels``). `build_ahead`
puts it beside this file instead, where it is found first. The file name carries a digest of
source, compiler flags and processor, so a stale or foreign library is never loaded.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).parent
PREBUILT = _HERE / "prebuilt"
_DTYPES = {torch.float32: 1, torch.bfloat16: 2}


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


def cache_dir() -> Path:
    """Folder of compiled kernels."""
    configured = os.environ.get("MEGATRON_RL_KERNEL_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "megatron_rl" / "kernels"


def _processor() -> str:
    """What ``-march=native`` depends on, so that a shared cache never mixes processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cpu_command() -> list[str]:
    compiler = os.environ.get("CXX", "g++")
    flags = ["-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared"]
    return [compiler, *flags, "-pthread"]


def _cuda_command(capability: tuple[int, int]) -> list[str]:
    home = os.environ.get("CUDA_HOME")
    compiler = str(Path(home) / "bin" / "nvcc") if home else "nvcc"
    arch = f"{capability[0]}{capability[1]}"
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    return [compiler, "-O3", "-std=c++17", target, "--fmad=false", "-Xcompiler", "-fPIC", "-shared"]


def _library(kind: str, source: Path, command: list[str], processor: str, folder: Path) -> Path:
    """Path of the compiled library in ``folder``, building it there if it is missing."""
    headers = [header.read_text() for header in sorted(source.parent.glob("*.cuh"))]
    identity = "\0".join([source.read_text(), *headers, *command[1:], processor])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    name = f"int8_{kind}_{digest}.so"
    for place in (PREBUILT, folder):
        if (place / name).exists():
            return place / name
    if shutil.which(command[0]) is None:
        raise BuildError(f"no compiler: {command[0]} is not on the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            _compile([*command, str(source)], folder / name)
    return folder / name


def _compile(command: list[str], target: Path) -> None:
    """Compile beside the target, then rename: a reader never sees half a library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
        os.replace(built, target)


@functools.cache
def _cpu_library() -> ctypes.CDLL:
    source = _HERE / "csrc" / "int8_cpu.cpp"
    return ctypes.CDLL(str(_library("cpu", source, _cpu_command(), _processor(), cache_dir())))


@functools.cache
def _cuda_library(capability: tuple[int, int]) -> ctypes.CDLL:
    source = _HERE / "csrc" / "int8_cuda.cu"
    return ctypes.CDLL(str(_library("cuda", source, _cuda_command(capability), "", cache_dir())))


def load_cpu() -> None:
    """Make the CPU kernels ready; raises `BuildError` or ``OSError`` where that is impossible."""
    _cpu_library()


def load_cuda(device: torch.device) -> None:
    """Make the kernels for this GPU ready; raises `BuildError` or ``OSError``."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise BuildError(f"compute capability {capability} is below 8.0")
    _cuda_library(capability)


def build_ahead(
    capabilities: tuple[tuple[int, int], ...] = ((8, 0), (9, 0)), folder: Path = PREBUILT
) -> list[Path]:
    """Compile everything a compiler is here for (``MEGATRON_RL_BUILD_KERNELS=1 pip install .``)."""
    sources = _HERE / "csrc"
    jobs = [("cpu", sources / "int8_cpu.cpp", _cpu_command(), _processor())]
    jobs += [("cuda", sources / "int8_cuda.cu", _cuda_command(c), "") for c in capabilities]
    return [_library(*job, folder) for job in jobs if shutil.which(job[2][0])]


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
