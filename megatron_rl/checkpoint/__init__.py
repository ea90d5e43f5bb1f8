"""Checkpoints: exact resume, atomic and verified, safe to load, under any layout."""

from megatron_rl.checkpoint.contents import Stateful
from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.rng import RngState

__all__ = ["CheckpointError", "CheckpointManager", "RngState", "Stateful"]
