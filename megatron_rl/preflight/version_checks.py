"""Do the installed versions fit together? Pure functions of `Facts`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..versions import MINIMUM_PYTHON, REQUIREMENTS
from .facts import Facts, Software
from .report import Finding, fail, ok, unknown, warn

MINIMUM_NCCL = "2.18"
# Whose own requirements are compared with what is installed. Others are none of our business.
_STACK = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
    "transformers",
    "tokenizers",
    "triton",
    "flash-attn",
)


def check_python(facts: Facts) -> list[Finding]:
    """Python is new enough for this package."""
    minimum = ".".join(map(str, MINIMUM_PYTHON))
    found = facts.software.python
    if Version(found) < Version(minimum):
        return [
            fail(
                "python",
                f"Python {found} is older than {minimum}",
                f"make the virtual environment with Python {minimum} or newer",
            )
        ]
    return [ok("python", f"Python {found}")]


def check_packages(facts: Facts) -> list[Finding]:
    """Every package this one needs is installed and new enough."""
    findings = []
    for name, minimum in REQUIREMENTS.items():
        found = facts.software.packages.get(name)
        install = f"pip install '{name}>={minimum}'"
        if found is None:
            findings.append(fail(name, f"{name} is not installed", install))
        elif _version(found) < Version(minimum):
            findings.append(fail(name, f"{name} {found} is older than {minimum}", install))
        elif name in ("torch", "megatron-core", "transformers"):
            findings.append(ok(name, f"{name} {found}"))
    return findings


def check_requirements(facts: Facts) -> list[Finding]:
    """Packages of the training stack get the versions that they themselves ask for.

    Requirements behind an extra (Megatron-Core names its range of Transformer Engine there) count
    only if the package is installed anyway.
    """
    findings = []
    for owner in _STACK:
        for text in facts.software.requirements.get(owner, []):
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            name = canonicalize_name(requirement.name)
            found = facts.software.packages.get(name)
            if found is None or name not in _STACK or not requirement.specifier:
                continue
            if requirement.specifier.contains(_version(found), prereleases=True):
                continue
            findings.append(_mismatch(owner, requirement, name, found))
    return findings


def _mismatch(owner: str, requirement: Requirement, name: str, found: str) -> Finding:
    optional = requirement.marker is not None and "extra" in str(requirement.marker)
    message = f"{owner} is made for {name}{requirement.specifier}, but {found} is installed"
    fix = f"pip install '{name}{requirement.specifier}', or another version of {owner}"
    return warn(name, message, fix) if optional else fail(name, message, fix)


def check_cuda(facts: Facts) -> list[Finding]:
    """torch was built for CUDA, and the driver can run that CUDA."""
    software = facts.software
    if software.torch_cuda is None:
        if facts.plan.needs_gpu or facts.machine.gpus:
            return [
                fail(
                    "cuda",
                    "torch is a CPU build, but there are GPUs to use",
                    "install a CUDA build of torch (https://pytorch.org/get-started), or set "
                    "runtime.device=cpu",
                )
            ]
        return [
            unknown(
                "cuda",
                "torch is a CPU build and no GPU is visible: CUDA, the driver and "
                "NCCL were not checked",
            )
        ]
    if software.driver_cuda is None:
        message = f"no NVIDIA driver is loaded; torch wants CUDA {software.torch_cuda}"
        if facts.plan.needs_gpu:
            return [
                fail(
                    "cuda",
                    message,
                    "run on a node with GPUs, or load the driver (nvidia-smi must work)",
                )
            ]
        return [unknown("cuda", message)]
    # Minor versions of one CUDA major are compatible with each other; majors are not.
    if Version(software.driver_cuda).major < Version(software.torch_cuda).major:
        return [
            fail(
                "cuda",
                f"the driver runs CUDA up to {software.driver_cuda}, torch was built "
                f"for {software.torch_cuda}",
                f"update the driver, or install torch for CUDA {software.driver_cuda}",
            )
        ]
    return [ok("cuda", f"CUDA {software.torch_cuda}, driver up to {software.driver_cuda}")]


def check_nccl_version(facts: Facts) -> list[Finding]:
    """NCCL is at least the version whose behaviour this package was written for."""
    found = facts.software.nccl
    if found is None:
        return (
            [] if facts.software.torch_cuda is None else [unknown("nccl", "version not readable")]
        )
    if Version(found) < Version(MINIMUM_NCCL):
        return [
            fail(
                "nccl",
                f"NCCL {found} is older than {MINIMUM_NCCL}",
                "install a newer torch, or pip install --upgrade nvidia-nccl-cu12",
            )
        ]
    return [ok("nccl", f"NCCL {found}")]


def check_known_bad(facts: Facts) -> list[Finding]:
    """No combination from known_bad.json."""
    findings = []
    for entry in known_bad():
        if entry.get("machine", facts.software.machine) != facts.software.machine:
            continue
        found = {name: _named_version(facts.software, name) for name in entry["when"]}
        if not all(
            version and SpecifierSet(entry["when"][name]).contains(_version(version), True)
            for name, version in found.items()
        ):
            continue
        what = " with ".join(f"{name} {version}" for name, version in found.items())
        source = f" ({entry['source']})" if "source" in entry else ""
        make = fail if entry["status"] == "fail" else warn
        findings.append(make("known bad", f"{what}: {entry['why']}{source}", entry["fix"]))
    return findings


def check_apex(facts: Facts) -> list[Finding]:
    """`import apex` gives NVIDIA's Apex or nothing."""
    if facts.software.apex == "other":
        return [
            fail(
                "apex",
                "the installed package `apex` is not NVIDIA's Apex: PyPI's package of "
                "that name is a web toolkit",
                "pip uninstall apex; Apex is optional and is built from "
                "https://github.com/NVIDIA/apex",
            )
        ]
    return [ok("apex", "NVIDIA's Apex")] if facts.software.apex == "nvidia" else []


def check_transformer_engine(facts: Facts) -> list[Finding]:
    """Say whether Transformer Engine will be used."""
    found = facts.software.packages.get("transformer-engine")
    if found:
        return [ok("transformer-engine", f"Transformer Engine {found}")]
    if not facts.uses_gpu:
        return []
    return [
        warn(
            "transformer-engine",
            "not installed: training falls back to torch layers",
            "pip install 'transformer-engine[pytorch]', or ignore this if you want the fallback",
        )
    ]


def check_megatron_origin(facts: Facts) -> list[Finding]:
    """`megatron.core` comes from the installed distribution, not from a checkout on the path."""
    origin, installed = facts.software.megatron_origin, facts.software.megatron_installed
    if origin is None or installed is None or _same_file(origin, installed):
        return []
    return [
        warn(
            "megatron-core",
            f"megatron.core is imported from {Path(origin).parent}, not from "
            f"the installed version at {Path(installed).parent}",
            "take that folder out of PYTHONPATH (or the working directory), or uninstall "
            "megatron-core if the checkout is what you want",
        )
    ]


def _same_file(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _named_version(software: Software, name: str) -> str | None:
    special = {
        "python": software.python,
        "nccl": software.nccl,
        "cuda": software.torch_cuda,
        "driver-cuda": software.driver_cuda,
    }
    return special[name] if name in special else software.packages.get(name)


def _version(text: str) -> Version:
    """A version without its local part (`2.9.0+cu130`), which no range mentions."""
    try:
        return Version(Version(text).public)
    except InvalidVersion:
        return Version("0")


@cache
def known_bad() -> list[dict[str, Any]]:
    """The entries of known_bad.json."""
    path = Path(__file__).with_name("known_bad.json")
    return json.loads(path.read_text(encoding="utf-8"))["entries"]
