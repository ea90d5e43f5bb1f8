"""Training that stops and resumes on any layout, in terms of tests/engine/training_case.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.checkpoint import CheckpointManager, RngState
from megatron_rl.engine.optimizer import Trainable
from tests.engine import training_case as case


class Counter:
    """A small state."""

    def __init__(self) -> None:
        self.value = 0.1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Losses:
    """The losses so far, as state of the run."""

    def __init__(self) -> None:
        self.values: list = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = [tuple(pair) for pair in state["values"]]


def train_step(trainable: Trainable, micro_batch_size: int) -> tuple[float, float]:
    """One update; the loss and gradient norm, equal on all ranks."""
    from megatron_rl.engine.schedule import forward_backward

    model = trainable.model
    objective = case.value_objective if model.head == "value" else case.policy_objective
    trainable.zero_grad()
    batches, count = case.microbatches(model, micro_batch_size)
    metrics = forward_backward(model, batches, objective(model), count)
    loss = sum((m["loss"] for m in metrics), torch.zeros(()))
    dist.all_reduce(loss, group=model.groups.dp)
    dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=model.groups.pp)
    draws()
    return loss.item(), trainable.step().grad_norm


def draws() -> list[float]:
    """Numbers of every generator, as shuffling and sampling would draw them."""
    return [random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(()).item()]


def optimizer_tensors(trainable: Trainable) -> dict[str, torch.Tensor]:
    """Everything this rank's optimizer holds, in its own order."""
    found = {}
    for i, part in enumerate(trainable.optimizer.chained_optimizers):
        for j, group in enumerate(part.optimizer.param_groups):
            found[f"{i}.{j}.lr"] = torch.tensor(group["lr"])
            for k, main in enumerate(group["params"]):
                found[f"{i}.{j}.{k}"] = main.detach().clone()
                for name, value in part.optimizer.state.get(main, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"{i}.{j}.{k}.{name}"] = value.clone()
    return found


def manager(folder: Path, trainables: dict[str, Trainable], **options) -> CheckpointManager:
    groups = next(iter(trainables.values())).model.groups
    made = CheckpointManager(
        folder, groups=groups, **{"keep_last": 2, "keep_every": None, **options}
    )
    for role, trainable in trainables.items():
        made.add_trainable(role, trainable)
    made.add_rank_state("rng", RngState())
    return made


def outcome(trainable: Trainable, losses: list) -> dict[str, Any]:
    return {
        "losses": losses,
        "weights": {n: p.detach().clone() for n, p in trainable.model.named_parameters()},
        "optimizer": optimizer_tensors(trainable),
        "random": draws(),
        "schedule": trainable.schedule.num_steps,
    }


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bitwise equality of two outcomes."""
    assert a["losses"] == b["losses"]
    assert a["schedule"] == b["schedule"]
    assert a["random"] == b["random"]
    for part in ("weights", "optimizer"):
        assert a[part].keys() == b[part].keys()
        for name, value in a[part].items():
            other = b[part][name]
            same = value.dtype == other.dtype and torch.equal(_bits(value), _bits(other))
            assert same, f"{part} {name} differs"


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Equal as bits: −0.0 is not 0.0."""
    return x.contiguous().view(-1).view(torch.uint8)
