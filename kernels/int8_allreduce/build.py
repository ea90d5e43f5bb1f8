"""Compiles the C++ (CPU) and CUDA kernels in ``csrc/``. Needs no torch, so that an isolated
``MEGATRON_RL_BUILD_KERNELS=1 pip install .`` can run it.

The sources need no torch headers: a plain C interface called through ctypes compiles in seconds
with g++ and works with any torch version.

A library is built on first use, by one process while the others of the machine wait at a file
lock, into ``$MEGATRON_RL_KERNEL_CACHE`` (default ``~/.cache/megatron_rl/kernels``). `build_ahead`
puts it beside this file instead, where it is found first. The file name carries a digest of
source, compiler flags and processor, so a stale or foreign library is never loaded.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
PREBUILT = _HERE / "prebuilt"


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


def cpu_library() -> Path:
    """The compiled CPU kernels; raises `BuildError` where they cannot be compiled."""
    source = _HERE / "csrc" / "int8_cpu.cpp"
    return _library("cpu", source, _cpu_command(), _processor(), cache_dir())


def cuda_library(capability: tuple[int, int]) -> Path:
    """The compiled kernels for one GPU architecture; raises `BuildError`."""
    source = _HERE / "csrc" / "int8_cuda.cu"
    return _library("cuda", source, _cuda_command(capability), "", cache_dir())


def build_ahead(
    capabilities: tuple[tuple[int, int], ...] = ((8, 0), (9, 0)), folder: Path = PREBUILT
) -> list[Path]:
    """Compile everything a compiler is here for (``MEGATRON_RL_BUILD_KERNELS=1 pip install .``)."""
    sources = _HERE / "csrc"
    jobs = [("cpu", sources / "int8_cpu.cpp", _cpu_command(), _processor())]
    jobs += [("cuda", sources / "int8_cuda.cu", _cuda_command(c), "") for c in capabilities]
    return [_library(*job, folder) for job in jobs if shutil.which(job[2][0])]
