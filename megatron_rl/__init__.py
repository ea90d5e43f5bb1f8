"""Reinforcement learning of large language models in one Megatron-Core application."""

from __future__ import annotations

import importlib

from megatron_rl.versions import VERSION

__version__ = VERSION

# Loaded on first use: importing torch and Megatron takes seconds that `--help` should not cost.
_PUBLIC = {
    "Config": "megatron_rl.config",
    "ConfigError": "megatron_rl.config",
    "Trainer": "megatron_rl.trainer",
    "create_inference_engine": "megatron_rl.inference",
    "serve_frozen_model": "megatron_rl.frozen.service",
}

__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'megatron_rl' has no attribute {name!r}")
