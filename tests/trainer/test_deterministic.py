"""Layer: pure. What `training.deterministic` sets before anything runs on a device."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_rl.config import ConfigError
from megatron_rl.runtime import choose_deterministic_kernels

CUBLAS, ENGINE = "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    for name in (CUBLAS, ENGINE):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)


def test_torch_and_the_libraries_are_told():
    choose_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert os.environ[CUBLAS] == ":4096:8" and os.environ[ENGINE] == "0"


def test_a_choice_that_is_deterministic_too_is_kept(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":16:8")
    choose_deterministic_kernels()
    assert os.environ[CUBLAS] == ":16:8"


@pytest.mark.parametrize("name, value", [(CUBLAS, ":0:0"), (ENGINE, "1")])
def test_an_environment_that_asks_for_the_opposite_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"training.deterministic is true.*{name}={value}"):
        choose_deterministic_kernels()
    assert not torch.are_deterministic_algorithms_enabled()
