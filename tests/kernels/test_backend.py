"""Pure: which implementation of a kernel is picked, and that it is said once."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_rl.kernels.backend import ENV, use_triton


def test_cpu_tensors_take_torch_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv(ENV, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cpu = torch.zeros(1)
    assert use_triton("k", cpu) is False
    assert use_triton("k", cpu, "triton") is True
    monkeypatch.setenv(ENV, "triton")
    assert use_triton("k", cpu) is True
    assert use_triton("k", cpu, "torch") is False


def test_triton_on_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        use_triton("k", torch.zeros(1), "triton")


def test_unknown_choice_names_its_source(monkeypatch):
    monkeypatch.setenv(ENV, "cuda")
    with pytest.raises(ValueError, match=f"{ENV}='cuda'"):
        use_triton("k", torch.zeros(1))
    with pytest.raises(ValueError, match="backend='fast'"):
        use_triton("k", torch.zeros(1), "fast")


def test_a_path_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="megatron_rl.kernels.backend"):
        for _ in range(3):
            use_triton("logged-once", torch.zeros(1), "torch")
    assert [r.getMessage() for r in caplog.records] == ["logged-once runs on torch (backend=torch)"]
