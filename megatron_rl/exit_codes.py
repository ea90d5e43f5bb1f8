"""How a run ends, in the numbers that launchers read."""

from __future__ import annotations

DONE = 0
CRASH = 1
BAD_INPUT = 2
REQUEUE = 75
"""Stopped by a signal: start the same command again and it goes on."""
LOST_RANK = 76
"""Ended because of another rank, which died or failed: its own code says more."""
INTERRUPTED = 130
