"""Unsupported Python or packages (pure): one sentence with what is wrong and the way out."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import versions
from megatron_rl.versions import REQUIREMENTS, UnsupportedVersionError, check_versions


def pretend(monkeypatch, **replaced):
    real = importlib.metadata.version

    def version(name):
        found = replaced.get(name.replace("-", "_"), real(name))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_this_environment_is_supported():
    check_versions()


@pytest.mark.parametrize(("name", "version"), [("torch", "2.5.1+cu124"), ("megatron_core", "0.9")])
def test_old_package(monkeypatch, name, version):
    pretend(monkeypatch, **{name: version})
    name = name.replace("_", "-")
    with pytest.raises(UnsupportedVersionError) as error:
        check_versions()
    minimum = REQUIREMENTS[name]
    assert str(error.value) == (
        f"megatron-rl needs {name} {minimum} or newer, but {version} is installed; "
        f"pip install '{name}>={minimum}'."
    )


@pytest.mark.parametrize("version", ["2.6.0", "2.10.0+cu130", "2.11.0a0+gitabc", "3.0"])
def test_new_enough_torch(monkeypatch, version):
    pretend(monkeypatch, torch=version)
    check_versions()


def test_missing_package(monkeypatch):
    pretend(monkeypatch, pyyaml=None)
    with pytest.raises(UnsupportedVersionError, match="pyyaml .* is not installed; pip install"):
        check_versions()


def test_old_python(monkeypatch):
    monkeypatch.setattr(versions.sys, "version_info", (3, 10, 12))
    with pytest.raises(
        UnsupportedVersionError, match="Python 3.11 or newer, but .* is Python 3.10"
    ):
        check_versions()


def test_check_imports_no_package_that_it_checks():
    script = "import sys; from megatron_rl.versions import check_versions; check_versions(); "
    script += "print({'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules))"
    command = [sys.executable, "-c", script]
    root = Path(versions.__file__).parents[1]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    assert result.stdout.strip() == "set()"
