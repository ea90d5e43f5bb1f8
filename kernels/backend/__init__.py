"""Which implementation of a kernel runs: Triton, or the plain-torch reference.

Each kernel asks once per call with `use_triton`. The answer depends on the tensor's device, on
whether Triton imports, on the call's `backend` argument and on the environment variable
`MEGATRON_RL_KERNELS` (`auto`, `triton` or `torch`); the first time a kernel takes a path, the
path and its reason are logged.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import torch

ENV = "MEGATRON_RL_KERNELS"
CHOICES = ("auto", "triton", "torch")

_log = logging.getLogger(__name__)


def use_triton(kernel: str, tensor: torch.Tensor, backend: str = "auto") -> bool:
    """Return True where `kernel` should run its Triton version on `tensor`.

    `backend="auto"` defers to `MEGATRON_RL_KERNELS`, and where that is `auto` too takes Triton on
    CUDA tensors and torch elsewhere. `"triton"` on a CPU tensor needs Triton's interpreter
    (`TRITON_INTERPRET=1`), which is slow and meant for tests.

    Raises:
        ValueError: an unknown choice, Triton asked for but not installed, or Triton asked for on
            a CPU tensor without the interpreter.
    """
    choice, source = (backend, "backend") if backend != "auto" else (_from_environment(), ENV)
    if choice not in CHOICES:
        raise ValueError(f"{source}={choice!r} is not one of {', '.join(CHOICES)}")
    if choice == "torch":
        return _announce(kernel, False, f"{source}=torch")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if choice == "triton":
        if not _triton_installed():
            raise ValueError(f"{source}=triton, but Triton does not import: pip install triton")
        if not tensor.is_cuda and not interpreted:
            raise ValueError(
                f"{source}=triton needs a CUDA tensor, got {tensor.device}: set "
                "TRITON_INTERPRET=1 before Triton is imported, or use backend='torch'"
            )
        return _announce(kernel, True, f"{source}=triton")
    if not tensor.is_cuda:
        return _announce(kernel, False, "the tensors are not on a CUDA device")
    if not _triton_installed():
        return _announce(kernel, False, "Triton is not installed")
    return _announce(kernel, True, "CUDA tensors and Triton found")


def _from_environment() -> str:
    return os.environ.get(ENV, "auto")


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _announce(kernel: str, triton: bool, reason: str) -> bool:
    # The cache makes this run, and so log, once per kernel, path and reason.
    _log.info("%s runs on %s (%s)", kernel, "Triton" if triton else "torch", reason)
    return triton
