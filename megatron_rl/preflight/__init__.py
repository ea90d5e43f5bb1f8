"""Checks before a run: versions, variables, the machine, and under torchrun the links.

`run_preflight` is what `train_ppo.py` calls in its first seconds; `python -m megatron_rl.preflight`
shows the same as a table.
"""

from .facts import Facts
from .report import Finding, PreflightError, Report, Status
from .run import check, gather, run_preflight

__all__ = [
    "Facts",
    "Finding",
    "PreflightError",
    "Report",
    "Status",
    "check",
    "gather",
    "run_preflight",
]
