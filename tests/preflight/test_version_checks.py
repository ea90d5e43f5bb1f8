"""Do the versions fit? Layer: pure functions on written-down facts."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from megatron_rl.preflight import version_checks as checks
from megatron_rl.preflight.report import Status
from megatron_rl.preflight.run import VERSION_CHECKS
from tests.preflight.facts_factory import healthy, problems

PACKAGES = healthy().software.packages


def test_healthy_stack_has_no_problem():
    facts = healthy()
    findings = [finding for check in VERSION_CHECKS for finding in check(facts)]
    assert problems(findings) == []
    assert {"python", "torch", "megatron-core", "cuda", "nccl"} <= {f.check for f in findings}


@pytest.mark.parametrize(
    ("check", "changes", "status", "said", "fix"),
    [
        ("check_python", {"python": "3.10.4"}, "fail", "3.10.4 is older than 3.11", "3.11"),
        ("check_packages", {"packages": {**PACKAGES, "torch": "2.5.1"}}, "fail",
         "torch 2.5.1 is older", "pip install 'torch>="),
        ("check_packages", {"packages": {k: v for k, v in PACKAGES.items() if k != "rich"}}, "fail",
         "rich is not installed", "pip install 'rich>="),
        ("check_cuda", {"torch_cuda": None}, "fail", "torch is a CPU build", "runtime.device=cpu"),
        ("check_cuda", {"torch_cuda": None, "needs_gpu": None, "gpus": None}, "unknown",
         "were not checked", ""),
        ("check_cuda", {"driver_cuda": None}, "fail", "no NVIDIA driver", "nvidia-smi"),
        ("check_cuda", {"driver_cuda": "12.8"}, "fail", "up to 12.8, torch was built for 13.0",
         "update the driver"),
        ("check_nccl_version", {"nccl": "2.17.1"}, "fail", "2.17.1 is older than 2.18", "nccl"),
        ("check_nccl_version", {"nccl": None}, "unknown", "not readable", ""),
        ("check_apex", {"apex": "other"}, "fail", "not NVIDIA's Apex", "pip uninstall apex"),
        ("check_transformer_engine",
         {"packages": {k: v for k, v in PACKAGES.items() if k != "transformer-engine"}}, "warn",
         "falls back", "pip install"),
        ("check_megatron_origin", {"megatron_origin": "/home/me/mlm/megatron/core/__init__.py"},
         "warn", "imported from /home/me/mlm/megatron/core", "PYTHONPATH"),
    ],
)  # fmt: skip
def test_unfit_version_is_said_with_the_fix(check, changes, status, said, fix):
    findings = getattr(checks, check)(healthy(**changes))
    hit = [f for f in findings if said in f.message]
    assert [f.status for f in hit] == [Status(status)], findings
    assert fix in hit[0].fix


def test_minor_cuda_versions_are_compatible():
    facts = healthy(torch_cuda="12.8", driver_cuda="12.2")
    assert problems(checks.check_cuda(facts)) == []


@pytest.mark.parametrize(
    ("requirement", "installed", "status"),
    [
        ("torch>=2.9", "2.9.1+cu130", None),
        ("torch==2.9.0", "2.9.1+cu130", Status.FAIL),
        ('torch<2.9; extra == "dev"', "2.9.1+cu130", Status.WARN),
        ("torch (>=2.9", "2.9.1", None),  # unreadable: none of our business
        ("requests>=99", "2.9.1", None),  # not part of the stack
    ],
)
def test_packages_get_what_they_ask_for(requirement, installed, status):
    facts = healthy(
        packages={**PACKAGES, "torch": installed, "requests": "1.0"},
        requirements={"transformer-engine": [requirement]},
    )
    found = checks.check_requirements(facts)
    assert [f.status for f in found] == ([status] if status else [])
    if found:
        assert "transformer-engine is made for torch" in found[0].message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nccl": "2.29.2"}, "nccl 2.29.2: NCCL 2.29.2 has a hang"),
        ({"nccl": "2.28.9", "machine": "aarch64"}, "on Arm, NCCL before 2.29.3"),
        ({"packages": {**PACKAGES, "megatron-core": "0.17.0"}}, "need Python 3.12"),
    ],
)
def test_known_bad_pairs_fail_with_their_reason(changes, said):
    found = checks.check_known_bad(healthy(**changes))
    assert [f.status for f in found] == [Status.FAIL]
    assert said in found[0].message


def test_known_bad_pairs_do_not_hit_other_machines_or_versions():
    assert checks.check_known_bad(healthy(nccl="2.28.9")) == []
    assert checks.check_known_bad(healthy(nccl=None)) == []
    newer = healthy(python="3.12.3", packages={**PACKAGES, "megatron-core": "0.17.0"})
    assert checks.check_known_bad(newer) == []


def test_known_bad_entries_are_complete():
    for entry in checks.known_bad():
        assert entry["status"] in ("fail", "warn")
        assert entry["why"] and entry["fix"]
        assert entry["when"] and all(SpecifierSet(text) for text in entry["when"].values())
