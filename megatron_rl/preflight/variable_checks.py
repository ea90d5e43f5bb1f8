"""Environment variables of NCCL, torch and CUDA: deprecated, unknown, contradictory.

Pure functions of `Facts`. A contradiction that would stop NCCL is a failure where NCCL is used and
a warning where it is not (`for_nccl`).
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from .facts import Facts
from .report import Finding, fail, ok, unknown, warn

_NCCL_PREFIX, _TORCH_PREFIXES = "NCCL_", ("TORCH_NCCL_", "TORCH_FR_")
# NCCL parses these with strtoll and silently takes its default when that fails.
_INTEGERS = {
    "NCCL_IB_TIMEOUT": (1, 31),
    "NCCL_IB_RETRY_CNT": (1, 7),
    "NCCL_IB_SL": (0, 15),
    "NCCL_IB_TC": (0, 255),
    "NCCL_IB_QPS_PER_CONNECTION": (1, 128),
    "NCCL_SOCKET_NTHREADS": (1, 16),
    "NCCL_NSOCKS_PERTHREAD": (1, 64),
    "NCCL_IB_DISABLE": (0, 1),
    "NCCL_P2P_DISABLE": (0, 1),
    "NCCL_SHM_DISABLE": (0, 1),
}
_MAXIMUM_SOCKETS = 64


def check_replaced(facts: Facts) -> list[Finding]:
    """No variable that recipes in circulation set and that is deprecated or read by nothing."""
    findings = []
    for name, entry in table()["replaced"].items():
        if name not in facts.environment or not _reached(facts, entry.get("since", {})):
            continue
        use = entry["use"]
        instead = f"unset {name} and use {use} instead" if use else f"unset {name}"
        findings.append(warn("variables", f"{name} is set, but {entry['why']}", instead))
    return findings


def check_unknown(facts: Facts) -> list[Finding]:
    """Every NCCL_*, TORCH_NCCL_* and TORCH_FR_* variable is read by the installed library."""
    nccl, torch = facts.software.nccl_names, facts.software.torch_names
    of_nccl = f"NCCL {facts.software.nccl}"
    of_torch = f"torch {facts.software.packages.get('torch', '')}"
    findings = []
    for name in sorted(facts.environment):
        if name in table()["replaced"]:
            continue
        if name.startswith(_TORCH_PREFIXES):
            known, library = torch or frozenset(table()["torch_names"]), of_torch
        elif name.startswith(_NCCL_PREFIX) and not _for_others(name):
            known = nccl or frozenset(table()["nccl_names"])
            library = of_nccl if nccl else f"NCCL {table()['nccl_names_version']} (none is loaded)"
        else:
            continue
        if name not in known:
            findings.append(_unknown_name(name, known, library))
    if nccl is None and any(name.startswith(_NCCL_PREFIX) for name in facts.environment):
        findings.append(unknown("variables", "no NCCL is loaded here to compare NCCL_* with"))
    return findings


def _unknown_name(name: str, known: frozenset[str], library: str) -> Finding:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? Otherwise unset it" if near else f"unset {name}"
    return warn("variables", f"{name} is set, but {library} does not read it", meant)


def _for_others(name: str) -> bool:
    others = table()
    return name in others["not_for_nccl"] or name.startswith(tuple(others["plugin_prefixes"]))


def _reached(facts: Facts, since: dict[str, str]) -> bool:
    """Whether the installed library is at least the version named; unknown counts as newest."""
    versions = {"torch": facts.software.packages.get("torch"), "nccl": facts.software.nccl}
    return all(
        versions[library] is None or Version(versions[library]) >= Version(version)
        for library, version in since.items()
    )


def check_values(facts: Facts) -> list[Finding]:
    """Integer variables hold integers in NCCL's documented range."""
    findings = []
    for name, (low, high) in _INTEGERS.items():
        value = facts.environment.get(name)
        if value is None:
            continue
        try:
            fits = low <= int(value, 0) <= high
        except ValueError:
            fits = False
        if not fits:
            message = f"{name}={value}: NCCL takes an integer from {low} to {high}"
            findings.append(warn("variables", message, f"set {name} within {low}..{high}"))
    return findings


def check_transport(facts: Facts) -> list[Finding]:
    """The variables that choose a transport agree with each other."""
    env, make = facts.environment, _for_nccl(facts)
    findings = []
    ib_off, net = _on(env, "NCCL_IB_DISABLE"), env.get("NCCL_NET", "").lower()
    if ib_off and net == "ib":
        findings.append(
            make(
                "variables",
                "NCCL_IB_DISABLE=1 contradicts NCCL_NET=IB: NCCL finds no network",
                "unset one of the two",
            )
        )
    tuned = sorted(name for name in env if name.startswith(("NCCL_IB_HCA", "NCCL_IB_GID_INDEX")))
    if tuned and (ib_off or net == "socket"):
        off = "NCCL_IB_DISABLE=1" if ib_off else f"NCCL_NET={env['NCCL_NET']}"
        findings.append(
            warn(
                "variables",
                f"{' and '.join(tuned)} tune InfiniBand, but {off} turns it off",
                f"unset {off.split('=')[0]} to use InfiniBand, or unset {', '.join(tuned)}",
            )
        )
    if _on(env, "NCCL_P2P_DISABLE") and "NCCL_P2P_LEVEL" in env:
        findings.append(
            warn(
                "variables",
                "NCCL_P2P_DISABLE=1 contradicts "
                f"NCCL_P2P_LEVEL={env['NCCL_P2P_LEVEL']}: peer to peer is off",
                "unset one of them",
            )
        )
    elif _on(env, "NCCL_P2P_DISABLE") and facts.uses_gpu:
        findings.append(
            warn(
                "variables",
                "NCCL_P2P_DISABLE=1 keeps NVLink unused",
                "unset it unless a fault of this machine needs it",
            )
        )
    if _on(env, "NCCL_SHM_DISABLE") and _on(env, "NCCL_P2P_DISABLE"):
        findings.append(
            warn(
                "variables",
                "NCCL_SHM_DISABLE=1 with NCCL_P2P_DISABLE=1 sends the traffic inside "
                "a host through the network",
                "unset NCCL_SHM_DISABLE",
            )
        )
    return findings


def check_channels(facts: Facts) -> list[Finding]:
    """Minimum and maximum, and the products NCCL limits, agree."""
    env, findings = facts.environment, []
    for unit in ("CTAS", "NCHANNELS", "P2P_NCHANNELS"):
        low, high = _integer(env, f"NCCL_MIN_{unit}"), _integer(env, f"NCCL_MAX_{unit}")
        if low is not None and high is not None and low > high:
            findings.append(
                warn(
                    "variables",
                    f"NCCL_MIN_{unit}={low} is above NCCL_MAX_{unit}={high}",
                    f"raise NCCL_MAX_{unit} or lower NCCL_MIN_{unit}",
                )
            )
    threads, sockets = (
        _integer(env, "NCCL_SOCKET_NTHREADS"),
        _integer(env, "NCCL_NSOCKS_PERTHREAD"),
    )
    if threads and sockets and threads * sockets > _MAXIMUM_SOCKETS:
        findings.append(
            warn(
                "variables",
                f"NCCL_SOCKET_NTHREADS × NCCL_NSOCKS_PERTHREAD is {threads} × "
                f"{sockets} = {threads * sockets}: NCCL allows {_MAXIMUM_SOCKETS}",
                "lower one of them",
            )
        )
    return findings


def check_error_handling(facts: Facts) -> list[Finding]:
    """torch's watchdog variables agree, so that a hang ends and leaves a record."""
    env, findings = facts.environment, []
    handling = env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    if _on(env, "TORCH_NCCL_BLOCKING_WAIT") and handling not in (None, "0"):
        findings.append(
            warn(
                "variables",
                "TORCH_NCCL_BLOCKING_WAIT=1 and TORCH_NCCL_ASYNC_ERROR_HANDLING="
                f"{handling} are alternatives: blocking waits stall the host and win",
                "unset TORCH_NCCL_BLOCKING_WAIT",
            )
        )
    if handling == "0" and not _on(env, "TORCH_NCCL_BLOCKING_WAIT"):
        findings.append(
            warn(
                "variables",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a rank that waits for a dead one "
                "waits for ever, and runtime.collective_timeout has no effect",
                "unset TORCH_NCCL_ASYNC_ERROR_HANDLING",
            )
        )
    buffer = env.get("TORCH_FR_BUFFER_SIZE", env.get("TORCH_NCCL_TRACE_BUFFER_SIZE"))
    if _on(env, "TORCH_NCCL_DUMP_ON_TIMEOUT") and buffer == "0":
        findings.append(
            warn(
                "variables",
                "TORCH_NCCL_DUMP_ON_TIMEOUT=1 has nothing to dump: the flight "
                "recorder's buffer size is 0",
                "export TORCH_FR_BUFFER_SIZE=2000",
            )
        )
    return findings


def check_renamed_pairs(facts: Facts) -> list[Finding]:
    """An old and a new name of one variable do not carry different values."""
    env, findings = facts.environment, []
    for old, entry in table()["replaced"].items():
        new = entry["use"]
        if old in env and new in env and env[old] != env[new]:
            findings.append(
                warn(
                    "variables",
                    f"{old}={env[old]} contradicts its newer name {new}={env[new]}",
                    f"unset {old}",
                )
            )
    return findings


def check_allocator(facts: Facts) -> list[Finding]:
    """Expandable segments and NCCL's registration of graph buffers exclude each other."""
    env = facts.environment
    conf = env.get("PYTORCH_ALLOC_CONF", env.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "expandable_segments:True" not in conf or env.get("NCCL_GRAPH_REGISTER") == "0":
        return []
    return [
        warn(
            "variables",
            "expandable_segments:True without NCCL_GRAPH_REGISTER=0: NCCL registers "
            "the buffers of captured graphs as one allocation, which they then are not (illegal "
            "memory access or a hang before Blackwell)",
            "export NCCL_GRAPH_REGISTER=0",
        )
    ]


def check_debug(facts: Facts) -> list[Finding]:
    """Logging variables do what was meant."""
    env, findings = facts.environment, []
    for name in ("NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        if name in env and env.get("NCCL_DEBUG", "VERSION") in ("", "VERSION", "NONE"):
            findings.append(
                warn(
                    "variables",
                    f"{name} does nothing without NCCL_DEBUG=INFO",
                    f"export NCCL_DEBUG=INFO, or unset {name}",
                )
            )
    target = env.get("NCCL_DEBUG_FILE", "%p")
    if facts.plan.hosts * facts.plan.ranks_on_host > 1 and not {"%h", "%p"} & {
        target[i : i + 2] for i in range(len(target))
    }:
        findings.append(
            warn(
                "variables",
                f"NCCL_DEBUG_FILE={target} is one file for all ranks",
                f"export NCCL_DEBUG_FILE={target}.%h.%p",
            )
        )
    return findings


def summary(facts: Facts, findings: list[Finding]) -> list[Finding]:
    """One line that says the variables were looked at, when nothing was found."""
    if findings:
        return findings
    names = [n for n in facts.environment if n.startswith((_NCCL_PREFIX, *_TORCH_PREFIXES))]
    return [ok("variables", f"{len(names)} NCCL and torch variables are set, none in conflict")]


def _for_nccl(facts: Facts):
    return fail if facts.uses_gpu else warn


def _on(env: dict[str, str], name: str) -> bool:
    return env.get(name, "0").strip().lower() not in ("", "0", "false", "n", "no")


def _integer(env: dict[str, str], name: str) -> int | None:
    try:
        return int(env[name], 0)
    except (KeyError, ValueError):
        return None


@cache
def table() -> dict[str, Any]:
    """The contents of nccl_variables.json."""
    path = Path(__file__).with_name("nccl_variables.json")
    return json.loads(path.read_text(encoding="utf-8"))
