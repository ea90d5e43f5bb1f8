"""Is this host fit for the run? Pure functions of `Facts`."""

from __future__ import annotations

from .facts import Facts, Gpu, Interface
from .report import Finding, fail, ok, unknown, warn

GIB = 1024**3
# A process group opens a socket per peer and stream; loaders and checkpoint writers add theirs.
_MINIMUM_OPEN_FILES = 4096
# NCCL keeps its intra-host buffers there; 512 MiB per rank is what its documentation asks for in
# containers, whose default is 64 MiB for everything.
_SHARED_MEMORY_PER_RANK = GIB // 2
_LOOPBACK = "lo"


def check_gpus(facts: Facts) -> list[Finding]:
    """There is a healthy GPU for every rank of this host."""
    gpus, wanted = facts.machine.gpus, facts.plan.ranks_on_host
    if not gpus:
        if facts.plan.needs_gpu:
            return [
                fail(
                    "gpu",
                    "runtime.device is cuda, but nvidia-smi shows no GPU",
                    "run on a node with GPUs, or set runtime.device=cpu",
                )
            ]
        return [unknown("gpu", "no GPU is visible: their number and health were not checked")]
    findings = [finding for gpu in gpus for finding in _gpu_health(gpu)]
    if facts.uses_gpu and len(gpus) < wanted:
        findings.append(
            fail(
                "gpu",
                f"{wanted} ranks on this host, but {len(gpus)} GPUs",
                f"start {len(gpus)} ranks here, or ask for {wanted} GPUs",
            )
        )
    if len({gpu.name for gpu in gpus}) > 1:
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        findings.append(
            warn(
                "gpu",
                f"unlike GPUs on one host: {names}",
                "expect the speed of the slowest, or choose with CUDA_VISIBLE_DEVICES",
            )
        )
    return findings or [ok("gpu", f"{len(gpus)} × {gpus[0].name}, {gpus[0].memory_gib:.0f} GiB")]


def _gpu_health(gpu: Gpu) -> list[Finding]:
    reset = f"drain the node and reset GPU {gpu.index} (nvidia-smi --gpu-reset)"
    findings = []
    if gpu.uncorrected_ecc_errors:
        findings.append(
            fail(
                "gpu",
                f"GPU {gpu.index} has {gpu.uncorrected_ecc_errors} uncorrected "
                "memory errors since it was started",
                reset,
            )
        )
    if gpu.remapping_failed:
        findings.append(
            fail(
                "gpu",
                f"GPU {gpu.index} could not remap a bad memory row",
                f"take GPU {gpu.index} out of service: it needs replacement",
            )
        )
    if gpu.remapping_pending:
        findings.append(
            warn("gpu", f"GPU {gpu.index} waits for a reset to remap a memory row", reset)
        )
    if gpu.hardware_slowdown:
        findings.append(
            warn(
                "gpu",
                f"GPU {gpu.index} is slowed down by its hardware (heat or power)",
                "check the node's cooling and power: all ranks wait for the slowest",
            )
        )
    return findings


def check_rdma(facts: Facts) -> list[Finding]:
    """RDMA ports are up, and at one speed."""
    ports = facts.machine.rdma_ports
    if ports is None or not ports:
        found = "the kernel has no RDMA subsystem" if ports is None else "no RDMA device"
        if facts.plan.hosts > 1 and facts.uses_gpu:
            return [
                warn(
                    "rdma",
                    f"{found}: traffic between hosts goes over TCP",
                    "load the RDMA driver (ibstat must show ACTIVE), or expect slow gradients",
                )
            ]
        return [unknown("rdma", f"{found}: InfiniBand and RoCE were not checked")]
    findings, active = [], [p for p in ports if p.state == "ACTIVE"]
    for port in ports:
        if port.state == "ACTIVE":
            continue
        name = f"{port.device} port {port.port}"
        state = f"{port.state}, {port.physical_state}"
        findings.append(
            warn(
                "rdma",
                f"{name} is {state}",
                f"check its cable and switch port, or leave it out: NCCL_IB_HCA=^{port.device}",
            )
        )
    if not active:
        make = fail if facts.plan.hosts > 1 and facts.uses_gpu else warn
        findings.append(make("rdma", "no RDMA port is ACTIVE", "see ibstat; ask the administrator"))
    elif len({p.rate_gbps for p in active}) > 1:
        rates = ", ".join(f"{p.device} {p.rate_gbps:g}" for p in active)
        findings.append(
            warn(
                "rdma",
                f"RDMA ports at unlike speeds in Gbit/s: {rates}",
                "choose the fast ones with NCCL_IB_HCA, or mend the slow ones",
            )
        )
    return findings or [ok("rdma", f"{len(active)} ports ACTIVE at {active[0].rate_gbps:g} Gbit/s")]


def check_interfaces(facts: Facts) -> list[Finding]:
    """The network interfaces that NCCL and Gloo are told to use exist and are up."""
    env, findings = facts.environment, []
    chosen: dict[str, list[str]] = {}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(variable)
        if not value:
            continue
        matched = matching_interfaces(value, facts.machine.interfaces, exact=variable[0] == "G")
        chosen[variable] = [i.name for i in matched]
        available = ", ".join(i.name for i in facts.machine.interfaces if i.up)
        if not matched:
            findings.append(
                fail(
                    "interfaces",
                    f"{variable}={value} matches no interface of this host",
                    f"choose from: {available}",
                )
            )
        elif not any(i.up for i in matched):
            findings.append(
                fail(
                    "interfaces",
                    f"{variable}={value} selects interfaces that are down",
                    f"choose from: {available}",
                )
            )
        elif facts.plan.hosts > 1 and all(i.name == _LOOPBACK for i in matched):
            findings.append(
                fail(
                    "interfaces",
                    f"{variable}={value} selects the loopback in a run "
                    f"over {facts.plan.hosts} hosts",
                    f"choose from: {available}",
                )
            )
    if len(chosen) == 2 and not set.intersection(*map(set, chosen.values())):
        findings.append(
            warn(
                "interfaces",
                "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select different interfaces",
                "set both to the interface between the hosts",
            )
        )
    up = [i.name for i in facts.machine.interfaces if i.up]
    return findings or [ok("interfaces", f"up: {', '.join(up) or 'none'}")]


def matching_interfaces(value: str, interfaces: list[Interface], *, exact: bool) -> list[Interface]:
    """Interfaces that a *_SOCKET_IFNAME value selects.

    NCCL: a comma-separated list of prefixes; a leading `=` asks for exact names, `^` for all
    others. Gloo (`exact`): a list of names.
    """
    inverted = value.startswith("^") and not exact
    value = value[1:] if inverted else value
    exact = exact or value.startswith("=")
    names = [name for name in value.lstrip("=").split(",") if name]

    def selected(interface: Interface) -> bool:
        hit = any(interface.name == n if exact else interface.name.startswith(n) for n in names)
        return hit != inverted

    return [i for i in interfaces if selected(i)]


def check_limits(facts: Facts) -> list[Finding]:
    """Open files and locked memory are enough."""
    limits, findings = facts.machine.limits, []
    files = limits.get("nofile", 0)
    if files is not None and files < _MINIMUM_OPEN_FILES:
        findings.append(
            warn(
                "limits",
                f"open files (ulimit -n) is {files}",
                f"ulimit -n 65536 before the start: below {_MINIMUM_OPEN_FILES} large "
                "groups and data loaders run out",
            )
        )
    locked = limits.get("memlock")
    if locked is not None and facts.machine.rdma_ports:
        findings.append(
            fail(
                "limits",
                f"locked memory (ulimit -l) is {locked} bytes",
                "ulimit -l unlimited (under Slurm: PropagateResourceLimitsExcept="
                "MEMLOCK, and LimitMEMLOCK=infinity for slurmd): RDMA registers memory",
            )
        )
    return findings or [
        ok("limits", f"open files {files or 'unlimited'}, locked memory {locked or 'unlimited'}")
    ]


def check_shared_memory(facts: Facts) -> list[Finding]:
    """/dev/shm holds the buffers of every rank of this host."""
    total, free = facts.machine.shared_memory_total, facts.machine.shared_memory_free
    if total is None or free is None:
        return [unknown("/dev/shm", "it is not mounted")]
    needed = facts.plan.ranks_on_host * _SHARED_MEMORY_PER_RANK
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free >= needed:
        return [ok("/dev/shm", text)]
    make = fail if facts.uses_gpu and facts.plan.ranks_on_host > 1 else warn
    return [
        make(
            "/dev/shm",
            f"{text}, {facts.plan.ranks_on_host} ranks want {needed / GIB:.1f} GiB",
            "start the container with --shm-size=16g (or --ipc=host), or delete leftovers in "
            "/dev/shm",
        )
    ]


def check_disk(facts: Facts) -> list[Finding]:
    """There is room for the checkpoints that will be kept, and one more while writing."""
    plan, free = facts.plan, facts.machine.disk_free
    if plan.checkpoint_dir is None:
        return [unknown("disk", "no --config was given: the room for checkpoints was not checked")]
    if facts.machine.checkpoint_dir_writable is False:
        return [
            fail(
                "disk",
                f"checkpoint.dir {plan.checkpoint_dir} is not writable",
                "set checkpoint.dir to a folder that every node can write",
            )
        ]
    if free is None or plan.checkpoint_bytes is None:
        return [unknown("disk", "the size of a checkpoint could not be estimated")]
    needed = plan.checkpoint_bytes * (plan.checkpoints_kept + 1)
    text = (
        f"{plan.checkpoint_dir}: {free / GIB:.1f} GiB free, about {needed / GIB:.1f} GiB for "
        f"{plan.checkpoints_kept} + 1 checkpoints"
    )
    if free < plan.checkpoint_bytes:
        return [fail("disk", text, "free some space, or set checkpoint.dir to a larger disk")]
    if free < needed:
        return [
            warn("disk", text, "lower checkpoint.keep_last, or set checkpoint.dir to a larger disk")
        ]
    return [ok("disk", text)]


def check_clock(facts: Facts) -> list[Finding]:
    """The clock is kept by NTP or PTP: logs and traces of several hosts are merged by time."""
    state = facts.machine.clock_synchronised
    if state is None:
        return [unknown("clock", "the kernel does not say whether the clock is synchronised")]
    if state:
        return [ok("clock", "synchronised")]
    if facts.plan.hosts == 1:
        return [unknown("clock", "not synchronised, which one host does not need")]
    return [warn("clock", "the clock is not synchronised", "start chronyd or ntpd on this host")]


def check_layout(facts: Facts) -> list[Finding]:
    """Tensor parallelism stays inside a host."""
    plan = facts.plan
    if plan.hosts > 1 and plan.tensor_parallel > plan.ranks_on_host:
        return [
            warn(
                "layout",
                f"parallel.tp is {plan.tensor_parallel} with {plan.ranks_on_host} "
                "ranks per host: every layer waits for the network between hosts",
                f"set parallel.tp={plan.ranks_on_host} and raise parallel.pp",
            )
        ]
    return []
