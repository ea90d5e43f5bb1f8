"""The random state of one rank: Python, NumPy, torch (CPU and device), Megatron's tracker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


class RngState:
    """Saves and restores every generator that a run draws from, except those it owns itself."""

    def state_dict(self) -> dict[str, Any]:
        """A dictionary of tensors and JSON values."""
        version, numbers, gauss = random.getstate()
        numpy_state = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
            "numpy": {
                "numbers": [int(n) for n in numpy_state[1]], "position": int(numpy_state[2]),
                "has_gauss": int(numpy_state[3]), "gauss": float(numpy_state[4]),
            },
            "torch": torch.get_rng_state(),
            "tracker": {
                name: value.get_state() if isinstance(value, torch.Generator) else value.clone()
                for name, value in get_cuda_rng_tracker().get_states().items()
            },
        }  # fmt: skip
        if torch.cuda.is_available():
            state["device"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        python, numpy_state = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
        np.random.set_state(
            (
                "MT19937", np.array(numpy_state["numbers"], dtype=np.uint32),
                numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"],
            )
        )  # fmt: skip
        tracker = get_cuda_rng_tracker()
        current = tracker.get_states()
        for name, value in state["tracker"].items():
            if isinstance(current.get(name), torch.Generator):
                current[name].set_state(value)
            else:
                current[name] = value.clone()
        tracker.set_states(current)
        if torch.cuda.is_available() and "device" in state:
            torch.cuda.set_rng_state(state["device"])
        # Last: without a GPU Megatron's tracker works on the CPU generator.
        torch.set_rng_state(state["torch"])
