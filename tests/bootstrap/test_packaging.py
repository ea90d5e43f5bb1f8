"""The wheel and its metadata, and what installing it does to an environment that exists already."""

import ast
import email
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.bootstrap.build import OFFLINE, PIP
from tests.bootstrap.checkout_copy import ROOT


@pytest.fixture(scope="module")
def wheel(wheel_file) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel_file) as opened:
        yield opened


@pytest.fixture(scope="module")
def wheel_metadata(wheel) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_wheel_holds_every_source_file_and_nothing_else(wheel, source):
    expected = {"train_ppo.py"}
    for top, target in (("megatron_rl", "megatron_rl"), ("kernels", "megatron_rl/kernels")):
        for file in (source / top).rglob("*"):
            if file.is_file():
                expected.add(f"{target}/{file.relative_to(source / top)}")
    # A file that is missing here lies in a folder without __init__.py, or has a suffix that
    # package_data in setup.py does not name.
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packaged == expected


def test_kernels_import_beside_the_package_named_kernels(wheel, source, tmp_path):
    wheel.extractall(tmp_path)
    other = tmp_path / "kernels" / "theirs"
    other.mkdir(parents=True)
    (other.parent / "__init__.py").write_text("OTHER = True\n")
    (other / "__init__.py").write_text("")
    names = sorted(file.parent.name for file in source.glob("kernels/*/__init__.py"))
    assert names
    script = f"""
import importlib, importlib.util, kernels
assert kernels.OTHER
for name in {names!r}:
    module = importlib.import_module("megatron_rl.kernels." + name)
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
assert importlib.util.find_spec("megatron_rl.kernels.theirs") is None
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment)


def test_commands_lead_to_functions_that_exist(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    targets = re.findall(
        r"^(megatron-rl-[\w-]+) = ([\w.]+):(\w+)$", wheel.read(name).decode(), re.M
    )
    assert targets
    modules = {}
    for command, module, function in targets:
        file = module.replace(".", "/") + ".py"
        modules[file] = command
        assert file in wheel.namelist(), f"{command} names {module}, which does not exist"
        tree = ast.parse(wheel.read(file))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions, f"{command} names {module}:{function}, which does not exist"
    runnable = {name for name in wheel.namelist() if name.endswith("/__main__.py")}
    missing = runnable - set(modules)
    assert not missing, f"setup.py has no console command for {sorted(missing)}"


def test_metadata(wheel_metadata, source):
    from megatron_rl import __version__

    assert wheel_metadata["Name"] == "megatron-rl"
    assert wheel_metadata["Version"] == __version__
    assert wheel_metadata["Requires-Python"] == ">=3.11"
    assert wheel_metadata["License"] == "Apache-2.0"
    assert {"te", "vllm", "dev"} <= set(wheel_metadata.get_all("Provides-Extra"))
    requirements = [Requirement(line) for line in wheel_metadata.get_all("Requires-Dist")]
    names = {canonicalize_name(requirement.name) for requirement in requirements}
    assert {"torch", "megatron-core", "sentencepiece", "tensorboard"} <= names
    assert "apex" not in names  # on the package index that is an unrelated project
    for requirement in requirements:
        assert {part.operator for part in requirement.specifier} <= {">="}, str(requirement)


INSTALLED = {
    "torch": ("2.11.0+cu130", ["triton==3.6.0"]),
    "triton": ("3.6.0", []),
    "transformer-engine": ("2.11.0", ["transformer-engine-torch==2.11.0"]),
    "transformer-engine-torch": ("2.11.0", ["torch"]),
    "apex": ("0.1", ["packaging>20.6"]),
}


@pytest.mark.parametrize("extra", ["", "[te]", "[te,dev]"])
def test_install_changes_nothing_that_is_there(source, tmp_path, extra):
    for name, (version, requirements) in INSTALLED.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        lines += ["Provides-Extra: pytorch"] if name == "transformer-engine" else []
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "INSTALLER").write_text("pip\n")
    report = tmp_path / "report.json"
    # Without an index, a version that is not good enough would be an error, not a download.
    command = [*PIP, "install", "--dry-run", "--quiet", *OFFLINE, "--report", report]
    command.append(f"{source}{extra}")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    planned = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    assert planned == ["megatron-rl"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in found), "constraints.txt has exact versions only"
    return {canonicalize_name(name): version for name, version in found}


def requirements_of(name: str) -> list[str]:
    """What an installed package needs; the peers of slow tests may not be installed."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def test_everything_that_gets_installed_is_pinned(wheel_metadata):
    pinned = pins()
    waiting = [Requirement(line) for line in wheel_metadata.get_all("Requires-Dist")]
    waiting = [
        item
        for item in waiting
        if not item.marker or any(item.marker.evaluate({"extra": e}) for e in ("dev", "peers"))
    ]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"constraints.txt lacks {name}"
        assert requirement.specifier.contains(pinned[name]), (
            f"{name}=={pinned[name]}, {requirement}"
        )
        if name in seen:
            continue
        seen.add(name)
        for line in requirements_of(name):
            dependency = Requirement(line)
            # CUDA libraries come with torch's CUDA build, which pins them itself.
            cuda = dependency.name.startswith(("nvidia-", "cuda-"))
            if not cuda and (not dependency.marker or dependency.marker.evaluate({"extra": ""})):
                waiting.append(dependency)
    assert "apex" not in pinned
    # A local build label such as +cpu would tie the file to one index.
    assert not [version for version in pinned.values() if "+" in version]


def test_markers_are_declared_and_strict():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    names = {marker.partition(":")[0] for marker in settings["markers"]}
    assert names == {"ranks", "gpu", "slow", "slurm", "browser"}
    assert {"--strict-markers", "--import-mode=importlib"} <= set(settings["addopts"].split())


def test_licence_is_complete():
    text = (ROOT / "LICENSE").read_text()
    for part in ("Version 2.0, January 2004", "9. Accepting Warranty", "APPENDIX"):
        assert part in text
