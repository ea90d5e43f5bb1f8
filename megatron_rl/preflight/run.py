"""Gather the facts of this host, apply every check, act on the outcome."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from ..config import Config
from . import machine_checks, variable_checks, version_checks
from .facts import Facts
from .gather_machine import gather_machine
from .gather_software import gather_software, nccl_environment
from .plan import make_plan
from .report import Finding, Report

Check = Callable[[Facts], list[Finding]]

VERSION_CHECKS: tuple[Check, ...] = (
    version_checks.check_python,
    version_checks.check_packages,
    version_checks.check_requirements,
    version_checks.check_cuda,
    version_checks.check_nccl_version,
    version_checks.check_known_bad,
    version_checks.check_transformer_engine,
    version_checks.check_apex,
    version_checks.check_megatron_origin,
)
VARIABLE_CHECKS: tuple[Check, ...] = (
    variable_checks.check_replaced,
    variable_checks.check_renamed_pairs,
    variable_checks.check_unknown,
    variable_checks.check_values,
    variable_checks.check_transport,
    variable_checks.check_channels,
    variable_checks.check_error_handling,
    variable_checks.check_allocator,
    variable_checks.check_debug,
)
MACHINE_CHECKS: tuple[Check, ...] = (
    machine_checks.check_gpus,
    machine_checks.check_rdma,
    machine_checks.check_interfaces,
    machine_checks.check_limits,
    machine_checks.check_shared_memory,
    machine_checks.check_disk,
    machine_checks.check_clock,
    machine_checks.check_layout,
)


def gather(config: Config | None = None) -> Facts:
    """Facts about this host for a run of `config` (None: for no run in particular)."""
    environment = dict(os.environ)
    plan = make_plan(config, environment)
    return Facts(
        software=gather_software(),
        machine=gather_machine(plan.checkpoint_dir),
        environment=nccl_environment(environment),
        plan=plan,
    )


def check(facts: Facts) -> Report:
    """Apply every check to `facts`; reads nothing else."""
    variables = [finding for check_one in VARIABLE_CHECKS for finding in check_one(facts)]
    findings = [finding for check_one in VERSION_CHECKS for finding in check_one(facts)]
    findings += variable_checks.summary(facts, variables)
    findings += [finding for check_one in MACHINE_CHECKS for finding in check_one(facts)]
    return Report(host=facts.machine.host, findings=findings)


def run_preflight(
    config: Config | None = None, mode: Literal["warn", "fail", "off"] = "warn"
) -> Report:
    """Check this host before a run. Takes about a second; no link is measured.

    One rank per host is enough. The caller logs `report.failures` and `report.warnings`.

    Args:
        config: the run's configuration; None checks the machine alone.
        mode: the setting `monitor.preflight`. `off` returns an empty report.

    Raises:
        PreflightError: mode is `fail` and a check failed. It is a ValueError whose message lists
            every failure with its fix.
    """
    if mode not in ("warn", "fail", "off"):
        raise ValueError(f"monitor.preflight is {mode!r}: it must be warn, fail or off")
    if mode == "off":
        return Report(host="", findings=[])
    report = check(gather(config))
    if mode == "fail":
        report.raise_for_failures()
    return report
