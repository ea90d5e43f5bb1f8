"""Command line: `python -m megatron_rl.preflight [--config FILE] [--json]`.

Under torchrun (or with one Slurm task per rank) `--links` also measures the links between ranks.
Exit code: 0 passed, 1 a check failed, 2 wrong input.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

from ..config import Config, ConfigError
from .facts import Facts
from .nodes import collect, merge, write_report
from .report import Report, fail
from .run import check, gather

_LINK_TIMEOUT_SECONDS = 120


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parse(arguments)
    if options.collect:
        report = collect(options.collect, options.nodes.split(","))
        _show(report, as_json=options.json)
        return report.exit_code
    try:
        config = Config.load(options.config, options.overrides) if options.config else None
    except (ConfigError, OSError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    facts = gather(config)
    report = check(facts)
    first_of_host = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))) == 0
    if options.report_dir and first_of_host:
        write_report(report, options.report_dir, os.environ.get("SLURMD_NODENAME", report.host))
    with_links = _world_size() > 1 and not options.no_links
    if first_of_host and not (with_links and options.json):
        _show(report, as_json=options.json)
    if not with_links:
        return report.exit_code
    try:
        return _check_links(config, facts, report, as_json=options.json)
    except ValueError as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron_rl.preflight", description=__doc__)
    parser.add_argument("--config", type=Path, help="check for a run of this configuration")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--no-links", action="store_true", help="several ranks: measure no link")
    parser.add_argument("--report-dir", type=Path, help="also write <node>.json into this folder")
    parser.add_argument("--collect", type=Path, help="sum up the reports of this folder instead")
    parser.add_argument("--nodes", default="", help="with --collect: the job's nodes, a,b,c")
    parser.add_argument("overrides", nargs="*", help="section.key=value changes to the config")
    options = parser.parse_args(arguments)
    if options.collect and not options.nodes:
        parser.error("--collect needs --nodes, so that a node without a report is noticed")
    if options.overrides and not options.config:
        parser.error(f"{options.overrides[0]} changes a configuration: give --config too")
    return options


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(report.to_json())
    else:
        report.print()


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_links(config: Config | None, facts: Facts, local: Report, *, as_json: bool) -> int:
    """Measure with all ranks; rank 0 shows the outcome. Returns the same code on every rank.

    JSON is one object for the job: the hosts' own findings, then those on the links.

    Raises:
        ValueError: the configuration's layout does not fit the number of ranks.
    """
    import torch
    import torch.distributed as dist

    from ..parallel import Layout
    from .links import LinkError, measure

    world, rank = _world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    tp, pp = (config.parallel.tp, config.parallel.pp) if config else (1, 1)
    layout = Layout(world_size=world, tp=tp, pp=pp)
    use_gpu = facts.uses_gpu and torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_LINK_TIMEOUT_SECONDS)
    dist.init_process_group("nccl" if use_gpu else "gloo", timeout=timeout)
    hosts: list[Report] = [local] * world
    dist.all_gather_object(hosts, local)
    try:
        report = measure(layout, facts.machine, device, facts.plan.min_link_gbps)
    except LinkError as error:
        fix = "check the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and the hosts named"
        _show(Report(host=local.host, findings=[fail("links", str(error), fix)]), as_json=as_json)
        return 1
    if dist.get_rank() == 0:
        merged = merge({host.host: host for host in hosts}).findings if as_json else []
        _show(Report(host=report.host, findings=[*merged, *report.findings]), as_json=as_json)
    dist.destroy_process_group()
    return max(report.exit_code, *(host.exit_code for host in hosts))


if __name__ == "__main__":
    sys.exit(main())
