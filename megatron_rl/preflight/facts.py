"""What the checks look at: plain data, gathered elsewhere, so that a test can write it down.

None always means "could not be determined here", never "no".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Versions and origins of what this Python would import."""

    python: str
    machine: str
    """Processor architecture, as `uname -m` prints it."""
    packages: dict[str, str] = field(default_factory=dict)
    """Installed distribution → version, names normalised to lower case with dashes."""
    requirements: dict[str, list[str]] = field(default_factory=dict)
    """Installed distribution → its own requirement strings (PEP 508)."""
    apex: str | None = None
    """`nvidia`, `other`, or None when there is no module named apex."""
    megatron_origin: str | None = None
    """File that `import megatron.core` would load."""
    megatron_installed: str | None = None
    """File that belongs to the installed distribution megatron-core."""
    torch_cuda: str | None = None
    """CUDA version torch was built with; None for a CPU build."""
    driver_cuda: str | None = None
    """Newest CUDA version that the installed driver can run."""
    nccl: str | None = None
    """Version of the NCCL that torch loads."""
    nccl_names: frozenset[str] | None = None
    """Every NCCL_* variable that this NCCL reads."""
    torch_names: frozenset[str] | None = None
    """Every TORCH_NCCL_* and TORCH_FR_* variable that this torch reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """A network interface of the host."""

    name: str
    up: bool
    speed_gbps: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaPort:
    """A port of an InfiniBand or RoCE device, as /sys/class/infiniband shows it."""

    device: str
    port: int
    state: str
    """ACTIVE, DOWN, INIT, ARMED."""
    physical_state: str
    """LinkUp, Polling, Disabled."""
    rate_gbps: float | None
    link_layer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi shows it; counters are None when the driver does not tell them."""

    index: int
    name: str
    memory_gib: float
    uncorrected_ecc_errors: int | None = None
    remapping_pending: bool | None = None
    remapping_failed: bool | None = None
    hardware_slowdown: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """State of the host that decides whether a run survives on it."""

    host: str
    interfaces: list[Interface] = field(default_factory=list)
    rdma_ports: list[RdmaPort] | None = None
    """None: the kernel has no RDMA subsystem; []: it has one without devices."""
    gpus: list[Gpu] | None = None
    """None: nvidia-smi is missing or failed."""
    limits: dict[str, int | None] = field(default_factory=dict)
    """Soft limit by name (`nofile`, `memlock`, `nproc`), None for unlimited."""
    shared_memory_total: int | None = None
    shared_memory_free: int | None = None
    clock_synchronised: bool | None = None
    disk_free: int | None = None
    """Free bytes where checkpoints go."""
    checkpoint_dir_writable: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the run would ask of the machine; the defaults are those of a run without a config."""

    needs_gpu: bool | None = None
    """None: `runtime.device` is auto."""
    ranks_on_host: int = 1
    hosts: int = 1
    checkpoint_dir: Path | None = None
    checkpoint_bytes: int | None = None
    """Estimated size of one checkpoint."""
    checkpoints_kept: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    min_link_gbps: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything a local preflight knows."""

    software: Software
    machine: Machine
    environment: dict[str, str] = field(default_factory=dict)
    """The process's variables over those of NCCL's configuration files."""
    plan: Plan = field(default_factory=Plan)

    @property
    def uses_gpu(self) -> bool:
        """Whether NCCL and CUDA matter: asked for, or `auto` on a host that has GPUs."""
        if self.plan.needs_gpu is None:
            return bool(self.machine.gpus)
        return self.plan.needs_gpu
