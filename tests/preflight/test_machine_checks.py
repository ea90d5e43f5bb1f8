"""Is the host fit? Layer: pure functions on written-down facts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.preflight import machine_checks as checks
from megatron_rl.preflight.facts import Gpu
from megatron_rl.preflight.report import Status
from megatron_rl.preflight.run import MACHINE_CHECKS
from tests.preflight.facts_factory import GIB, healthy, problems

GPUS = healthy().machine.gpus
PORT = healthy().machine.rdma_ports[0]
DOWN = dataclasses.replace(PORT, device="mlx5_9", state="DOWN", physical_state="Polling")
CHECKPOINTS = {"checkpoint_dir": Path("/data/ckpt"), "checkpoint_bytes": 100 * GIB}


def test_healthy_host_has_no_problem():
    facts = healthy(**CHECKPOINTS)
    findings = [finding for check in MACHINE_CHECKS for finding in check(facts)]
    assert problems(findings) == []
    assert {f.check for f in findings} >= {"gpu", "rdma", "interfaces", "limits", "disk", "clock"}


@pytest.mark.parametrize(
    ("check", "changes", "status", "said", "fix"),
    [
        ("check_gpus", {"gpus": None}, "fail", "nvidia-smi shows no GPU", "runtime.device=cpu"),
        ("check_gpus", {"gpus": GPUS[:6]}, "fail", "8 ranks on this host, but 6 GPUs", "6 ranks"),
        ("check_gpus", {"gpus": None, "needs_gpu": None}, "unknown", "no GPU is visible", ""),
        ("check_rdma", {"rdma_ports": [PORT, DOWN]}, "warn", "mlx5_9 port 1 is DOWN, Polling",
         "NCCL_IB_HCA=^mlx5_9"),
        ("check_rdma", {"rdma_ports": [DOWN]}, "fail", "no RDMA port is ACTIVE", "ibstat"),
        ("check_rdma", {"rdma_ports": [PORT, dataclasses.replace(PORT, rate_gbps=100.0)]}, "warn",
         "unlike speeds", "NCCL_IB_HCA"),
        ("check_rdma", {"rdma_ports": []}, "warn", "goes over TCP", "RDMA driver"),
        ("check_rdma", {"rdma_ports": None, "hosts": 1}, "unknown", "not checked", ""),
        ("check_limits", {"limits": {"nofile": 1024, "memlock": None}}, "warn",
         "ulimit -n) is 1024", "ulimit -n 65536"),
        ("check_limits", {"limits": {"nofile": 65536, "memlock": 65536}}, "fail",
         "ulimit -l) is 65536 bytes", "LimitMEMLOCK"),
        ("check_shared_memory", {"shared_memory_free": GIB // 16}, "fail", "8 ranks want 4.0 GiB",
         "--shm-size"),
        ("check_shared_memory", {"shared_memory_total": None}, "unknown", "not mounted", ""),
        ("check_disk", {**CHECKPOINTS, "disk_free": 150 * GIB}, "warn", "150.0 GiB free, about "
         "200.0 GiB for 1 + 1", "keep_last"),
        ("check_disk", {**CHECKPOINTS, "disk_free": 99 * GIB}, "fail", "99.0 GiB free",
         "checkpoint.dir"),
        ("check_disk", {**CHECKPOINTS, "checkpoint_dir_writable": False}, "fail", "not writable",
         "checkpoint.dir"),
        ("check_disk", {}, "unknown", "no --config", ""),
        ("check_disk", {**CHECKPOINTS, "checkpoint_bytes": None}, "unknown", "estimated", ""),
        ("check_clock", {"clock_synchronised": False}, "warn", "not synchronised", "chronyd"),
        ("check_clock", {"clock_synchronised": None}, "unknown", "does not say", ""),
        ("check_layout", {"tensor_parallel": 16}, "warn", "parallel.tp is 16 with 8 ranks per host",
         "parallel.tp=8"),
    ],
)  # fmt: skip
def test_unfit_host_is_said_with_the_fix(check, changes, status, said, fix):
    findings = getattr(checks, check)(healthy(**changes))
    hit = [f for f in findings if said in f.message]
    assert [f.status for f in hit] == [Status(status)], findings
    assert fix in hit[0].fix


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ({"uncorrected_ecc_errors": 3}, "fail", "GPU 2 has 3 uncorrected memory errors"),
        ({"remapping_failed": True}, "fail", "GPU 2 could not remap"),
        ({"remapping_pending": True}, "warn", "GPU 2 waits for a reset"),
        ({"hardware_slowdown": True}, "warn", "GPU 2 is slowed down"),
    ],
)
def test_sick_gpu_is_named(fault, status, said):
    gpus = [*GPUS[:2], dataclasses.replace(GPUS[2], **fault), *GPUS[3:]]
    (finding,) = checks.check_gpus(healthy(gpus=gpus))
    assert finding.status == status and finding.message.startswith(said)


def test_unlike_gpus_are_noticed():
    gpus = [*GPUS[:7], Gpu(index=7, name="NVIDIA A100", memory_gib=40)]
    (finding,) = checks.check_gpus(healthy(gpus=gpus))
    assert "NVIDIA A100, NVIDIA H100" in finding.message


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"NCCL_SOCKET_IFNAME": "bond0"}, "NCCL_SOCKET_IFNAME=bond0 matches no interface"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME=eth matches no interface"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, "interfaces that are down"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "loopback in a run over 2 hosts"),
        ({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}, "different interfaces"),
    ],
)
def test_interface_selection_is_checked(environment, said):
    (finding,) = problems(checks.check_interfaces(healthy(environment=environment)))
    assert said in finding.message


@pytest.mark.parametrize(
    ("value", "exact", "selected"),
    [
        ("eth", False, ["eth0", "eth1"]),
        ("=eth", False, []),
        ("=eth0,ib0", False, ["eth0", "ib0"]),
        ("^lo,eth", False, ["ib0"]),
        ("eth0,lo", True, ["eth0", "lo"]),
    ],
)
def test_interface_patterns_follow_nccl_and_gloo(value, exact, selected):
    found = checks.matching_interfaces(value, healthy().machine.interfaces, exact=exact)
    assert [i.name for i in found] == selected


def test_names_of_the_selected_interfaces_agree_when_both_libraries_use_one():
    environment = {"NCCL_SOCKET_IFNAME": "^lo", "GLOO_SOCKET_IFNAME": "eth0"}
    assert problems(checks.check_interfaces(healthy(environment=environment))) == []


def test_slow_gloo_only_hosts_without_rdma_are_no_failure():
    facts = healthy(rdma_ports=None, gpus=None, needs_gpu=False)
    assert [f.status for f in checks.check_rdma(facts)] == [Status.UNKNOWN]
