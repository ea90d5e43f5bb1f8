"""NCCL's and torch's variables. Layer: pure functions on written-down facts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_rl.preflight import variable_checks as checks
from megatron_rl.preflight.report import Status
from megatron_rl.preflight.run import VARIABLE_CHECKS
from tests.preflight.facts_factory import healthy, problems

ROOT = Path(__file__).resolve().parents[2]


def found(environment, **changes):
    facts = healthy(environment=environment, **changes)
    return problems([finding for check in VARIABLE_CHECKS for finding in check(facts)])


@pytest.mark.parametrize(
    ("environment", "said", "fix"),
    [
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "renamed", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ({"NCCL_BLOCKING_WAIT": "1"}, "renamed", "TORCH_NCCL_BLOCKING_WAIT"),
        ({"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}, "ignores the variable", "unset"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, "flight recorder", "TORCH_FR_BUFFER_SIZE"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "all acc", "PYTORCH_ALLOC_CONF"),
        ({"NCCL_IB_CUDA_SUPPORT": "1"}, "removed", "NCCL_NET_GDR_LEVEL"),
        ({"NCCL_MAX_NCHANNELS": "8"}, "CTAs", "NCCL_MAX_CTAS"),
        ({"NCCL_TIMEOUT": "1800"}, "neither NCCL nor torch", "runtime.collective_timeout"),
        ({"NCCL_SOCKET_IFNAMES": "eth0"}, "NCCL 2.29.3 does not read it", "NCCL_SOCKET_IFNAME?"),
        ({"NCCL_ZZZ": "1"}, "does not read it", "unset NCCL_ZZZ"),
        ({"TORCH_NCCL_FAST": "1"}, "torch 2.9.1+cu130 does not read it", "unset TORCH_NCCL_FAST"),
        ({"NCCL_IB_TIMEOUT": "40"}, "an integer from 1 to 31", "1..31"),
        ({"NCCL_IB_DISABLE": "true"}, "an integer from 0 to 1", "0..1"),
        ({"NCCL_NET": "Socket", "NCCL_IB_HCA": "mlx5"}, "turns it off", "unset NCCL_NET"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, "contradicts NCCL_P2P_LEVEL", "unset"),
        ({"NCCL_P2P_DISABLE": "1"}, "keeps NVLink unused", "unset"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "through the network", "SHM"),
        ({"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "4"}, "above NCCL_MAX_CTAS=4", "raise"),
        ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, "= 128", "lower"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "waits for ever", "unset"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
         "are alternatives", "unset TORCH_NCCL_BLOCKING_WAIT"),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"}, "nothing to dump",
         "TORCH_FR_BUFFER_SIZE=2000"),
        ({"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}, "contradicts its newer name",
         "unset NCCL_BLOCKING_WAIT"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "NCCL registers",
         "NCCL_GRAPH_REGISTER=0"),
        ({"NCCL_DEBUG_SUBSYS": "NET"}, "does nothing without NCCL_DEBUG=INFO", "NCCL_DEBUG=INFO"),
        ({"NCCL_DEBUG_FILE": "/tmp/log", "NCCL_DEBUG": "INFO"}, "one file for all ranks",
         "/tmp/log.%h.%p"),
    ],
)  # fmt: skip
def test_variable_is_reported_with_what_to_use_instead(environment, said, fix):
    hits = [f for f in found(environment) if said in f.message]
    assert len(hits) == 1, found(environment)
    assert fix in hits[0].fix


def test_contradiction_that_stops_nccl_fails_only_where_nccl_is_used():
    environment = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "IB"}
    message = "NCCL finds no network"

    def status(**changes):
        return [f.status for f in found(environment, **changes) if message in f.message]

    assert status() == [Status.FAIL]
    assert status(gpus=None, needs_gpu=False) == [Status.WARN]


def test_renamed_variable_is_right_for_the_version_before_the_renaming():
    old = {"packages": {"torch": "2.8.0"}, "nccl": "2.16.2"}
    assert not any(
        "flight" in f.message for f in found({"TORCH_NCCL_TRACE_BUFFER_SIZE": "1"}, **old)
    )
    assert not any("CTAs" in f.message for f in found({"NCCL_MAX_NCHANNELS": "8"}, **old))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"},
        {"NCCL_VERSION": "2.29.3", "NCCL_HOME": "/usr"},  # images and build scripts
        {"NCCL_TUNER_CONFIG_PATH": "/etc/tuner", "NCCL_FASTRAK_IFNAME": "eth1"},  # plug-ins
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"},
        {"NCCL_DEBUG_FILE": "/tmp/log.%h.%p", "NCCL_DEBUG": "INFO"},
    ],
)
def test_sound_environment_is_quiet(environment):
    names = frozenset(
        {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_GRAPH_REGISTER", "NCCL_DEBUG_FILE"}
    )
    assert found(environment, nccl_names=names) == []


def test_without_a_library_the_list_of_names_is_used_and_that_is_said():
    facts = healthy(environment={"NCCL_SOCKET_IFNAMES": "x", "NCCL_IB_HCA": "m"}, nccl_names=None)
    warning, remark = checks.check_unknown(facts)
    assert "NCCL_SOCKET_IFNAMES" in warning.message and "none is loaded" in warning.message
    assert remark.status is Status.UNKNOWN


def test_the_launchers_environment_is_sound():
    """launch/env.sh sets nothing deprecated, unknown or contradictory, on the newest names."""
    command = f"env -i PATH={os.environ['PATH']} bash -c 'source {ROOT}/launch/env.sh; env'"
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    environment = dict(line.split("=", 1) for line in printed.stdout.splitlines())
    assert {"NCCL_DEBUG", "TORCH_FR_BUFFER_SIZE", "OMP_NUM_THREADS"} <= environment.keys()
    assert found(environment, nccl_names=None, torch_names=None) == []


def test_every_variable_of_the_launchers_environment_has_a_comment():
    lines = (ROOT / "launch/env.sh").read_text().splitlines()
    exports = [i for i, line in enumerate(lines) if line.startswith("export ")]
    assert exports
    for i in exports:
        assert lines[i - 1].startswith(("#", "export ")), f"line {i + 1} has no comment"
