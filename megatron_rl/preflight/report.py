"""What a check found, and how a list of findings is shown: a table, JSON, an exit code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Status(StrEnum):
    """Outcome of one check. `unknown`: it could not be looked at here, and that is said."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


# A batch log is no terminal: rich would fall back to 80 columns and break every fix in three.
_LOG_WIDTH = 140
_STYLE = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.UNKNOWN: "dim"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report.

    `message` says what is the case; `fix` says what to do about it and is required for a failure.
    """

    status: Status
    check: str
    message: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.status is not Status.FAIL, f"the failure {self.check} has no fix"


def ok(check: str, message: str) -> Finding:
    """A check that passed."""
    return Finding(status=Status.OK, check=check, message=message)


def warn(check: str, message: str, fix: str) -> Finding:
    """The run can go on, but slower or less safely than it could."""
    return Finding(status=Status.WARN, check=check, message=message, fix=fix)


def fail(check: str, message: str, fix: str) -> Finding:
    """The run would crash, hang, or waste the machine."""
    return Finding(status=Status.FAIL, check=check, message=message, fix=fix)


def unknown(check: str, message: str) -> Finding:
    """The check needs something this machine does not have."""
    return Finding(status=Status.UNKNOWN, check=check, message=message)


class PreflightError(ValueError):
    """A check failed and `monitor.preflight` is `fail`. The message lists failures and fixes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Findings of one host (or, for link checks, of one job)."""

    host: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def failures(self) -> list[Finding]:
        """The findings that make the exit code 1."""
        return [f for f in self.findings if f.status is Status.FAIL]

    @property
    def warnings(self) -> list[Finding]:
        """Findings worth a line in the log of a run that goes on."""
        return [f for f in self.findings if f.status is Status.WARN]

    @property
    def exit_code(self) -> int:
        """0, or 1 when a check failed."""
        return 1 if self.failures else 0

    def raise_for_failures(self) -> None:
        """Raise `PreflightError` when a check failed."""
        if not self.failures:
            return
        lines = [f"{f.check}: {f.message}. Fix: {f.fix}" for f in self.failures]
        raise PreflightError(
            f"preflight failed on {self.host} (monitor.preflight=warn starts anyway):\n  "
            + "\n  ".join(lines)
        )

    def to_json(self) -> str:
        """The report as one JSON object: host, exit_code, counts per status, findings."""
        counts = {s.value: sum(f.status is s for f in self.findings) for s in Status}
        return json.dumps(
            {
                "host": self.host,
                "exit_code": self.exit_code,
                "counts": counts,
                "findings": [asdict(f) for f in self.findings],
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The inverse of `to_json`.

        Raises:
            ValueError: if `text` is not such an object.
        """
        try:
            data = json.loads(text)
            findings = [Finding(**{**f, "status": Status(f["status"])}) for f in data["findings"]]
            return cls(host=data["host"], findings=findings)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a preflight report: {error!r}") from error

    def print(self, console: Console | None = None) -> None:
        """Show the report as a table; failures come last, nearest to the prompt."""
        if console is None:
            console = Console()
            if not console.is_terminal:
                console.width = _LOG_WIDTH
        table = Table(title=f"Preflight on {self.host}")
        table.add_column("", no_wrap=True)
        table.add_column("check", no_wrap=True)
        table.add_column("finding")
        order = [Status.OK, Status.UNKNOWN, Status.WARN, Status.FAIL]
        for finding in sorted(self.findings, key=lambda f: order.index(f.status)):
            text = escape(finding.message)
            if finding.fix:
                text += f"\n[bold]fix:[/bold] {escape(finding.fix)}"
            style = _STYLE[finding.status]
            table.add_row(f"[{style}]{finding.status}[/{style}]", escape(finding.check), text)
        console.print(table)
