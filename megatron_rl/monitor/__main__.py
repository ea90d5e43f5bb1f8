"""python -m megatron_rl.monitor report --run DIR: writes report.html of a run, finished or not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_rl.monitor.report import write_report


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code (0 done, 2 bad input)."""
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.monitor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="write report.html into a run folder")
    report.add_argument("--run", required=True, type=Path, metavar="DIR", help="the run_dir")
    arguments = parser.parse_args(argv)
    try:
        print(write_report(arguments.run))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
