"""Put the reports of a job's hosts together and name the bad ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from .report import Finding, Report, fail, ok


def write_report(report: Report, folder: Path, node: str) -> Path:
    """Write the report of `node` where `collect` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{node}.json"
    path.write_text(report.to_json(), encoding="utf-8")
    return path


def collect(folder: Path, nodes: Iterable[str]) -> Report:
    """One report for the job from the reports in `folder`.

    Args:
        folder: holds one `<node>.json` per node that came so far.
        nodes: the nodes of the job; one without a report counts as bad.
    """
    reports: dict[str, Report | None] = {}
    for node in nodes:
        try:
            reports[node] = Report.from_json((folder / f"{node}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            reports[node] = None
    return merge(reports)


def merge(reports: Mapping[str, Report | None]) -> Report:
    """What failed or was warned of, on which nodes, and which nodes to leave out.

    Args:
        reports: node → its report, None for a node that gave none.
    """
    seen: dict[Finding, list[str]] = {}
    bad = [node for node, report in reports.items() if report is None or report.failures]
    findings = []
    for node, report in reports.items():
        if report is None:
            findings.append(fail("node", f"{node} gave no report", _without([node])))
            continue
        for finding in report.failures + report.warnings:
            seen.setdefault(finding, []).append(node)
    for finding, where in seen.items():
        place = "all nodes" if len(where) == len(reports) > 1 else ", ".join(where)
        findings.append(dataclasses.replace(finding, message=f"{place}: {finding.message}"))
    # When every node fails, the fault is in the job and not in a node.
    if bad and len(bad) < len(reports):
        findings.append(fail("bad nodes", ", ".join(bad), _without(bad)))
    if not bad:
        findings.append(ok("nodes", f"{len(reports)} nodes passed"))
    return Report(host=f"{len(reports)} nodes", findings=findings)


def _without(nodes: list[str]) -> str:
    return f"submit again with: sbatch --exclude={','.join(nodes)}"
