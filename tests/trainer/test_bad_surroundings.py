"""Layer: pure and real processes. Variables, files and packages that no run can work with.

Each ends the program with one sentence and exit code 2, before any process group.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import train_ppo
from tests.trainer import run_case
from tests.trainer.bad_input_case import outcome, write

ENVIRONMENT = {
    "rank_beyond_the_world": ({"RANK": "4", "WORLD_SIZE": "2"}, [], ["RANK=4, WORLD_SIZE=2"]),
    "local_rank_beyond_the_node": (
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}, [],
        ["LOCAL_RANK=1 and 1 ranks on this node"],
    ),
    "world_is_no_number": ({"WORLD_SIZE": "two"}, [], ["whole numbers", "torchrun"]),
    "no_port": ({"MASTER_PORT": "http"}, [], ["MASTER_PORT='http'", "no port"]),
    "hidden_gpus": (
        {"CUDA_VISIBLE_DEVICES": ""}, ["runtime.device=cuda"],
        ["runtime.device is cuda", "CUDA_VISIBLE_DEVICES=''", "hides all GPUs"],
    ),
    "interpreted_kernels": (
        {"TRITON_INTERPRET": "1"}, ["runtime.device=cuda"], ["TRITON_INTERPRET='1'", "on the CPU"],
    ),
    "not_deterministic": (
        {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
        ["runtime.device=auto", "training.deterministic=true"],
        ["training.deterministic is true", "CUBLAS_WORKSPACE_CONFIG=':0:0'"],
    ),
    "no_such_interface": (
        {"GLOO_SOCKET_IFNAME": "eth99"}, [], ["GLOO_SOCKET_IFNAME=eth99", "interfaces are", "lo"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENVIRONMENT)
def test_variable_that_contradicts_the_run(case, tiny_model_dir, tmp_path, monkeypatch, capsys):
    variables, overrides, expected = ENVIRONMENT[case]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    config = write(tmp_path, run_case.settings(str(tiny_model_dir), tmp_path))
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", "--config", config, *overrides])
    rank_0 = "RANK" not in variables  # the others leave the message to rank 0
    assert train_ppo.main() == 2 and not dist.is_initialized()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 or not rank_0, error
    for fragment in expected:
        assert fragment in error, error


FILES = {
    "duplicate_key": (b"seed: 1\nseed: 2\n", ["seed is already set in line 1", "line 2"]),
    "tab": (b"model:\n\tactor: {path: x}\n", ["line 2: tab in the indentation"]),
    "not_yaml": (b"model: [\n", ["not valid YAML"]),
    "not_utf_8": (b"run_dir: \xff\n", ["not UTF-8"]),
    "empty": (b"\n", ["the configuration is empty"]),
    "a_list": (b"- model\n", ["expected `section:` lines"]),
    "a_tag": (b"seed: !!python/object/apply:os.system [ls]\n", ["tag", "not supported"]),
}


@pytest.mark.parametrize("case", FILES)
def test_file_that_cannot_be_read(case, tmp_path, monkeypatch, capsys):
    content, expected = FILES[case]
    (tmp_path / "run.yaml").write_bytes(content)
    code, error = outcome(monkeypatch, capsys, str(tmp_path / "run.yaml"))
    assert code == 2 and error.count("\n") == 1 and error.startswith("error: ")
    for fragment in expected:
        assert fragment in error, error


def real_command(folder: Path, *python: str) -> tuple[int, str]:
    """Exit code and standard error of the real command in a process of its own."""
    program = Path(train_ppo.__file__)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    result = subprocess.run(
        [*(python or (sys.executable,)), program, "--config", "nothing.yaml"], env=environment,
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    return result.returncode, result.stderr


def test_the_wrong_apex(tmp_path):
    (tmp_path / "apex" / "lib").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("")
    code, error = real_command(tmp_path)
    assert code == 2 and error.count("\n") == 1
    assert "`apex` is not NVIDIA's Apex" in error and "pip uninstall apex" in error


@pytest.mark.parametrize(("package", "version"), [("torch", "2.1.0"), ("megatron_core", "0.12")])
def test_an_unsupported_package(package, version, tmp_path):
    """Metadata in front of the installed ones, as a second environment on the path gives it."""
    folder = tmp_path / f"{package}-{version}.dist-info"
    folder.mkdir()
    name = package.replace("_", "-")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    code, error = real_command(tmp_path)
    assert code == 2 and error.count("\n") == 1
    assert f"needs {name} " in error and f"but {version} is installed; pip install" in error


def test_an_unsupported_python(tmp_path):
    folders = [Path(sys.base_prefix).parent, Path("/usr/bin"), Path("/usr/local/bin")]
    found = [p for f in folders for v in ("3.10", "3.9") for p in f.glob(f"{v}.*/bin/python{v}")]
    found += [path for v in ("3.10", "3.9") if (path := shutil.which(f"python{v}")) is not None]
    if not found:
        pytest.skip("there is no older Python on this machine")
    code, error = real_command(tmp_path, str(found[0]))
    assert code == 2 and error.count("\n") == 1, error
    assert "needs Python 3.11 or newer" in error and "make a virtual environment" in error
