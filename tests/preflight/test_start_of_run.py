"""The preflight as the first seconds of train_ppo.py. Layer: the command line in this process."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
import yaml

import train_ppo
from tests.trainer import run_case


@pytest.mark.parametrize("mode", ["fail", "warn", "off"])
def test_a_fault_of_the_machine_ends_the_run_or_is_said(
    tiny_model_dir, tmp_path, monkeypatch, capsys, mode
):
    """Gloo is told to use an interface that does not exist. The layout that does not fit ends the
    run where the preflight lets it go on."""
    values = run_case.settings(str(tiny_model_dir), tmp_path, parallel__tp=2)
    values["monitor"]["preflight"] = mode
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", "--config", str(config)])
    assert train_ppo.main() == 2
    assert not dist.is_initialized()
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert ("GLOO_SOCKET_IFNAME=nosuch0" in said) == (mode != "off")
    assert ("monitor.preflight is fail" in errors[0]) == (mode == "fail")
    assert ("parallel.tp" in errors[0]) == (mode != "fail")
