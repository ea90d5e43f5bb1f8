"""launch/venv.sh and launch/test.sh: what is installed when, and what is said when it can't be."""

import shutil
import subprocess

import pytest

from tests.bootstrap.checkout_copy import PYTHON, ROOT

SCRIPTS = sorted([*ROOT.glob("launch/**/*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_is_valid(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    command = [
        "shellcheck",
        "--shell=bash",
        "--external-sources",
        "--severity=warning",
        str(script),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_bare_machine_makes_and_fills_the_environment_once(checkout):
    result = checkout.run("launch/test.sh", "tests/engine", "-x")
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("===== 3 passed in 1.00s =====")
    made, pip_works, *rest = checkout.calls()
    assert made == "python -m venv .venv"
    assert "--constraint constraints.txt --editable .[dev]" in pip_works
    assert rest == [
        "python -m pytest -m not slow and not gpu and not slurm and not browser tests/engine -x"
    ]
    assert checkout.run("launch/test.sh").returncode == 0
    assert [call.split()[2] for call in checkout.calls()] == ["pytest"]


@pytest.mark.parametrize("file", ["constraints.txt", "setup.py", "megatron_rl/versions.py"])
def test_changed_requirements_are_installed_into_the_same_environment(checkout, file):
    checkout.run("launch/test.sh")
    checkout.calls()
    with (checkout.folder / file).open("a") as handle:
        handle.write("# changed\n")
    checkout.run("launch/test.sh")
    assert [call.split()[2] for call in checkout.calls()] == ["pip", "pip", "pytest"]


def test_failed_install_is_one_message_and_tried_again(checkout):
    result = checkout.run("launch/test.sh", PIP_STATUS="1")
    assert result.returncode == 1
    assert "package registry is reachable" in result.stderr
    assert not any("pytest" in call for call in checkout.calls())
    assert checkout.run("launch/test.sh").returncode == 0
    assert any("pip install" in call for call in checkout.calls())


def test_environment_without_pip_is_repaired(checkout):
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    checkout.executable(checkout.folder / ".venv" / "bin" / "python", "#!/bin/bash\nexit 1\n")
    assert checkout.run("launch/test.sh").returncode == 0
    assert checkout.calls()[0] == "python -m venv .venv"


def test_missing_python_names_the_way_out(checkout):
    (checkout.programs / "python3.11").unlink()
    result = checkout.run("launch/test.sh")
    assert result.returncode == 1
    assert "no Python 3.11 or newer found" in result.stderr and "PYTHON=" in result.stderr


def test_old_python_named_by_the_user_is_refused(checkout):
    checkout.program("python3.9", "#!/bin/bash\nexit 1\n")
    result = checkout.run("launch/test.sh", PYTHON="python3.9")
    assert result.returncode == 1
    assert "PYTHON=python3.9 is not a working Python 3.11 or newer" in result.stderr
    assert not (checkout.folder / ".venv").exists()


def test_python_without_venv_names_the_package(checkout):
    refusal = PYTHON.replace("case", '[[ "$*" != *ensurepip* ]] || exit 1\ncase', 1)
    checkout.program("python3.11", refusal)
    result = checkout.run("launch/test.sh")
    assert result.returncode == 1
    assert "apt-get install python3-venv" in result.stderr


def test_pytest_failure_is_the_exit_status(checkout):
    assert checkout.run("launch/test.sh", PYTEST_STATUS="1").returncode == 1
