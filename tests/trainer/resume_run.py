"""Whole PPO runs that are killed and resumed, in terms of run_case.settings."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.trainer import run_case

OF_THE_MACHINE = ("perf/", "throughput/", "spread/", "memory/", "hardware/")
"""Metrics that are no part of the computation: times, memory, load."""
ADAPTIVE = {
    "placement": "reward", "coef": 0.05,
    "adaptive": {"enable": True, "target": 0.01, "horizon": 50},
}  # fmt: skip


def settings(model: str, folder: Path, **changes: Any) -> dict:
    """Six steps of PPO with an adaptive KL coefficient, a schedule and a save after step 3."""
    folder.mkdir(exist_ok=True)
    values = run_case.settings(
        model, folder, **{
            "training__steps": 6, "algorithm__kl": ADAPTIVE, "rollout__max_new_tokens": 4,
            "training__epochs": 1, "training__micro_batch_size": 4,
            "checkpoint__save_interval": 3, "monitor__tensorboard": False, **changes,
        },
    )  # fmt: skip
    run_case.write_prompts(folder, 20)  # an epoch ends in the middle of a batch
    optimizer = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    values["training"]["actor"] |= optimizer
    values["training"]["critic"] |= optimizer
    return values


def run(rank: int, world: int, values: dict, kill: int | None) -> dict[str, Any]:
    """Trains to the end, resuming what is there.

    Args:
        kill: the last rank is killed (SIGKILL) when it has updated its weights in this step.

    Returns:
        The step it started from, what each step did, and everything the run ended with.
    """
    from megatron_rl import Config, Trainer
    from tests.checkpoint.resume_case import optimizer_tensors

    steps: list[dict[str, Any]] = []

    class Recorded(Trainer):
        def _update(self, batch: Any) -> Any:
            self.batch = batch
            result = super()._update(batch)
            if self.step_count + 1 == kill and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        def step(self) -> dict[str, float]:
            metrics = super().step()
            steps.append(record(self.batch, metrics) | {"kl_coef": self.kl.coef})
            return metrics

    trainer = Recorded(Config.from_dict(values))
    start = trainer.step_count
    try:
        trainer.train()
        trainables = {"actor": trainer.models.actor, "critic": trainer.models.critic}
        return {
            "start": start, "steps": steps, "notes": trainer.checkpoints.notes,
            "prompts": trainer.inputs.stream.state_dict(),
            "tensors": {
                f"{role} {name}": x.detach().cpu().clone()
                for role, trainable in trainables.items()
                for name, x in (
                    *trainable.model.named_parameters(),
                    *optimizer_tensors(trainable).items(),
                )
            },
        }  # fmt: skip
    finally:
        trainer.close()


def record(batch: Any, metrics: dict[str, float]) -> dict[str, Any]:
    """What one step did, without what depends on the machine."""
    return {
        "metrics": {k: v for k, v in metrics.items() if not k.startswith(OF_THE_MACHINE)},
        "prompts": [prompt.index for prompt in batch.prompts],
        "tokens": [sequence.tolist() for sequence in batch.sequences],
        "logprobs": batch.rollout_logprobs_BR.clone(),
        **{name: x.clone() for name, x in batch.tensors.items()},
    }
