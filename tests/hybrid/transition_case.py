"""Whole runs that record what happens around generation, for comparisons between modes."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist


def digest(model) -> str:
    """Identity of this rank's weights, bit by bit."""
    sha = hashlib.sha256()
    for _, parameter in model.named_parameters():
        sha.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def storages(model) -> dict[int, int]:
    """Bytes of every storage that the model's parameters live in."""
    found = {}
    for _, parameter in model.named_parameters():
        storage = parameter.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


class Wire:
    """Counts the bytes that torch.distributed is asked to receive while it is installed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.received = 0
        batch, gather = dist.batch_isend_irecv, dist.all_gather_into_tensor

        def counted_batch(operations):
            self.received += sum(o.tensor.nbytes for o in operations if o.op is dist.irecv)
            return batch(operations)

        def counted_gather(output, own, *args, **kwargs):
            self.received += output.nbytes - own.nbytes
            return gather(output, own, *args, **kwargs)

        patch.setattr(dist, "batch_isend_irecv", counted_batch)
        patch.setattr(dist, "all_gather_into_tensor", counted_gather)


def watch_transition(transition, model) -> list[dict]:
    """Records every round trip of a `MicroDP`: bytes on the wire, memory, weights."""
    seen: list[dict] = []
    there, back = transition.to_generation, transition.to_training

    def to_generation():
        before = digest(model)
        with pytest.MonkeyPatch.context() as patch:
            wire = Wire(patch)
            there()
        own = storages(model)
        beyond = sum(n for key, n in storages(transition.model).items() if key not in own)
        in_place = sum(
            p.untyped_storage()._cdata in own for _, p in transition.model.named_parameters()
        )
        seen.append({"received": wire.received, "beyond": beyond, "before": before,
                     "in_place": in_place, "extra": transition.extra_bytes})  # fmt: skip

    def to_training():
        back()
        seen[-1]["after"] = digest(model)
        seen[-1]["held"] = transition.extra_bytes

    transition.to_generation, transition.to_training = to_generation, to_training
    return seen


def run(rank, world, values, steps, watch=False):
    """Trains; returns each step's metrics and sequences, the final weights, and what was seen."""
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    sequences, rollout = [], trainer.rollout.draw_step

    def recorded():
        batch, extra = rollout()
        sequences.append([s.tolist() for s in batch.sequences])
        return batch, extra

    trainer.rollout.draw_step = recorded
    model = trainer.models.actor.model
    seen = watch_transition(trainer.models.transition, model) if watch else []
    try:
        metrics = [trainer.step() for _ in range(steps)]
        plan = trainer.models.transition.plan if watch else None
        planned = {}
        if watch:
            from megatron_rl.resharding.volumes import received_bytes

            planned = {
                "received": received_bytes(plan.specs, plan.train, plan.gen, rank),
                "generation": plan.generation_bytes(rank),
                "training": plan.training_bytes(rank), "tensors": len(plan.specs),
            }  # fmt: skip
        return {"metrics": metrics, "sequences": sequences, "weights": digest(model),
                "seen": seen, "planned": planned}  # fmt: skip
    finally:
        trainer.close()
