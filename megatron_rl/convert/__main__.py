"""`python -m megatron_rl.convert`: see command_line.py."""

from __future__ import annotations

import sys

from megatron_rl.runtime import quiet_expected_warnings


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    quiet_expected_warnings()  # before the imports that cause them
    from megatron_rl.convert.command_line import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
