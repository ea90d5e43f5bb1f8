"""The built wheel in a fresh environment, away from the checkout, trains one step (slow)."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from launch.make_sums import write_sums
from tests.bootstrap.build import PIP
from tests.bootstrap.checkout_copy import ROOT

# transformers looks for a package of this name; ours must not be taken for it, nor it for ours.
OTHER_PACKAGE_NAMED_KERNELS = "kernels==0.17.2"


@pytest.fixture(scope="module")
def environment(wheel_file, tmp_path_factory) -> Path:
    """A virtual environment with the wheel and the other `kernels`; dependencies are borrowed."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A plain path entry: .pth files over there, such as an editable install's, are not followed.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [*PIP, "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, wheel_file, OTHER_PACKAGE_NAMED_KERNELS], check=True)
    return folder


@pytest.mark.slow
def test_wheel_trains_one_step(environment, tiny_model_dir, tmp_path):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    origin = "import kernels, megatron_rl; print(kernels.__file__, megatron_rl.__file__)"
    command = [environment / "bin" / "python", "-c", origin]
    result = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=tmp_path, env=variables
    )
    assert all(line.startswith(str(environment)) for line in result.stdout.split())

    train, held_out = write_sums(tmp_path / "sums")
    settings = {
        "model.actor.path": tiny_model_dir,
        "parallel.tp": 1,
        "data.train": train,
        "data.eval": held_out,
        "rollout.batch_size": 4,
        "training.steps": 1,
        "evaluation.prompts": 4,
        "run_dir": tmp_path / "run",
    }
    command = [environment / "bin" / "megatron-rl-train"]
    command += ["--config", ROOT / "configs" / "quickstart.yaml"]
    command += [f"{name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True, cwd=tmp_path, env=variables, timeout=300)
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))
