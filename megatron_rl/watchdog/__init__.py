"""Notices a rank that died or hangs, says which one and where, and ends the run on all ranks."""

from megatron_rl.watchdog.thread import Watchdog

__all__ = ["Watchdog"]
