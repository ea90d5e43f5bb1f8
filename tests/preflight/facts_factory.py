"""Facts of a healthy GPU host, to be changed one at a time by the tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.preflight.facts import Facts, Gpu, Interface, Machine, Plan, RdmaPort, Software
from megatron_rl.preflight.report import Finding, Status
from megatron_rl.versions import REQUIREMENTS

GIB = 1024**3


def healthy(*, environment: dict[str, str] | None = None, **changes: Any) -> Facts:
    """Two hosts of eight GPUs; `changes` replace fields of software, machine or plan by name."""
    software = Software(
        python="3.11.9",
        machine="x86_64",
        packages={**REQUIREMENTS, "torch": "2.9.1+cu130", "transformer-engine": "2.11.0"},
        megatron_origin="/venv/megatron/core/__init__.py",
        megatron_installed="/venv/megatron/core/__init__.py",
        torch_cuda="13.0",
        driver_cuda="13.0",
        nccl="2.29.3",
        nccl_names=frozenset({"NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_NET"}),
        torch_names=frozenset({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE"}),
    )
    machine = Machine(
        host="gpu01",
        interfaces=[
            Interface(name="eth0", up=True, speed_gbps=25.0),
            Interface(name="eth1", up=False),
            Interface(name="ib0", up=True),
            Interface(name="lo", up=True),
        ],
        rdma_ports=[_port("mlx5_0"), _port("mlx5_1")],
        gpus=[Gpu(index=i, name="NVIDIA H100 80GB HBM3", memory_gib=79.6) for i in range(8)],
        limits={"nofile": 65536, "memlock": None, "nproc": None},
        shared_memory_total=64 * GIB,
        shared_memory_free=60 * GIB,
        clock_synchronised=True,
        disk_free=1000 * GIB,
        checkpoint_dir_writable=True,
    )
    plan = Plan(needs_gpu=True, ranks_on_host=8, hosts=2)
    parts = {"software": software, "machine": machine, "plan": plan}
    for name, value in changes.items():
        owner = next(part for part, facts in parts.items() if hasattr(facts, name))
        parts[owner] = dataclasses.replace(parts[owner], **{name: value})
    return Facts(**parts, environment=environment or {})


def _port(device: str) -> RdmaPort:
    return RdmaPort(
        device=device,
        port=1,
        state="ACTIVE",
        physical_state="LinkUp",
        rate_gbps=400.0,
        link_layer="InfiniBand",
    )


def problems(findings: list[Finding]) -> list[Finding]:
    """What is not simply in order."""
    return [f for f in findings if f.status in (Status.WARN, Status.FAIL)]
