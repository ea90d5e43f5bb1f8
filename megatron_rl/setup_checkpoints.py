"""What a run's checkpoints hold."""

from __future__ import annotations

from megatron_rl.checkpoint import CheckpointManager, RngState
from megatron_rl.checkpoint.contents import Stateful
from megatron_rl.config import Config
from megatron_rl.setup_models import Models


def build_checkpoints(
    config: Config, models: Models, states: dict[str, Stateful]
) -> CheckpointManager:
    """The models, `states` (equal on all ranks), the generators and the gradient compression."""
    settings = config.checkpoint
    manager = CheckpointManager(
        config.checkpoint_dir, groups=models.actor.model.groups, keep_last=settings.keep_last,
        keep_every=settings.keep_every, best_metric=settings.best_metric,
        async_save=settings.async_save, on_corrupt=settings.on_corrupt, config=config.to_dict(),
    )  # fmt: skip
    manager.add_trainable("actor", models.actor)
    if models.critic is not None:
        manager.add_trainable("critic", models.critic)
    for name, state in states.items():
        manager.add_state(name, state)
    manager.add_rank_state("rng", RngState())
    for trainable in (models.actor, models.critic):
        for index, part in enumerate(trainable.compression if trainable else []):
            name = f"{trainable.model.role}_gradient_compression_{index}"
            manager.add_rank_state(name, part)
    return manager
