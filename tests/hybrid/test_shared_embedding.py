"""Layer: gloo ranks. The critic reads the actor's embedding table and never changes it."""

from __future__ import annotations

import pytest
import torch

from tests.engine import training_case
from tests.trainer import run_case


def gradients(folder, world, shared, recompute, **layout):
    """Gradients of a critic whose table is its own or the actor's; and the actor's."""
    from megatron_rl.config.training import OptimizerSettings
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.engine.optimizer import Trainable
    from megatron_rl.engine.schedule import forward_backward
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.models.shared_embedding import read_embedding_of

    actor = training_case.build(folder, world, optimizer="adam", distributed_optimizer=True,
                                **layout)  # fmt: skip
    critic = build_model(
        "critic", read_architecture(folder), actor.model.groups, dtype="fp32",
        sp=layout.get("sp", False), recompute=recompute, trainable=True,
    )  # fmt: skip
    load_huggingface(critic, folder, fresh_head=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for chunk in critic.chunks:
            if chunk.post_process:
                head = chunk.output_layer.weight
                head.copy_(torch.randn(head.shape, generator=generator))
    if shared:
        saved = read_embedding_of(actor.model, critic)
        assert (saved > 0) == critic.groups.is_first_stage
    trainable = Trainable(critic, OptimizerSettings(), total_steps=1)
    batches, count = training_case.microbatches(critic, 2)
    actor.zero_grad()
    trainable.zero_grad()
    forward_backward(critic, batches, training_case.value_objective(critic), count)
    assert all(not p.main_grad.any() for _, p in actor.model.named_parameters())
    return {n: p.main_grad.clone() for n, p in critic.named_parameters()}


def compare_gradients(rank, world, folder, recompute, layout):
    own = gradients(folder, world, False, "none", **layout)
    read = gradients(folder, world, True, recompute, **layout)
    missing = set(own) - set(read)
    assert all(name.startswith("embedding.") for name in missing)
    for name, value in read.items():
        torch.testing.assert_close(value, own[name], rtol=1e-5, atol=1e-6)
    return len(missing), sum(bool(v.any()) for v in read.values())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("recompute", "layout"),
    [("full", dict(tp=2, sp=True)), pytest.param("none", dict(pp=2), marks=pytest.mark.slow)],
)
def test_all_other_gradients_are_those_without_sharing(ranks, tiny_model_dir, recompute, layout):
    results = ranks(2, compare_gradients, str(tiny_model_dir), recompute, layout)
    assert sum(missing for missing, _ in results) == (2 if "tp" in layout else 1)
    assert all(nonzero > 10 for _, nonzero in results)


def run_shared(rank, world, values, steps):
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    actor, critic = (t.model.chunks[0] for t in (trainer.models.actor, trainer.models.critic))
    table = actor.embedding.word_embeddings.weight
    before = table.detach().clone()
    try:
        metrics = [trainer.step() for _ in range(steps)]
        warm = bool(torch.equal(table, before))
        metrics.append(trainer.step())
        trainer.save()
        read = critic.embedding.word_embeddings.weight
        names = {name for name, _ in trainer.models.critic.model.named_parameters()}
        return {
            "same": read.data_ptr() == table.data_ptr(), "warm": warm, "metrics": metrics,
            "trained": not torch.equal(table, before), "names": names,
            "grad": read.requires_grad,
        }  # fmt: skip
    finally:
        trainer.close()


@pytest.mark.ranks
@pytest.mark.slow
def test_table_stays_the_actors_over_ten_steps(ranks, tiny_model_dir, tmp_path):
    """Critic-only steps change no bit of it; the actor's update does, and the critic sees it."""
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, parallel={"tp": 2}, training__steps=11,
        algorithm__critic_warmup_steps=9, hybrid_engine={"share_embeddings": "read_only"},
    )  # fmt: skip
    for result in ranks(2, run_shared, values, 9):
        assert result["same"] and result["warm"] and result["trained"] and not result["grad"]
        assert not any(name.startswith("embedding.") for name in result["names"])
        assert all(m["value/grad_norm"] > 0 for m in result["metrics"])
