"""Kernel tests run compiled on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

# Read by Triton when a kernel module is first imported, which its package does on first use.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    return request.param
