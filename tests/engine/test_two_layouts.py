"""Layer: gloo ranks. A TP2 and a PP2 model train side by side on the same two ranks."""

from __future__ import annotations

import pytest
import torch

from tests.engine import training_case as case


def step_pair(rank, world, folder, specs, steps):
    """Trains one model per spec in turn, in one process; losses and weights of each."""
    from megatron_rl.convert.huggingface import gathered_tensors
    from megatron_rl.engine.schedule import forward_backward

    pair = [case.build(folder, world, optimizer="adam", lr=1e-2, **spec) for spec in specs]
    losses = [[] for _ in pair]
    for _ in range(steps):
        for trainable, history in zip(pair, losses, strict=True):
            model = trainable.model
            batches, count = case.microbatches(model, 2)
            trainable.zero_grad()
            metrics = forward_backward(model, batches, case.policy_objective(model), count)
            loss = sum((m["loss"] for m in metrics), torch.zeros(()))
            torch.distributed.all_reduce(loss, group=model.groups.dp)
            torch.distributed.broadcast(
                loss, model.groups.stage_rank(model.groups.layout.pp - 1), group=model.groups.pp
            )
            history.append(loss.item())
            trainable.step()
    weights = [{k: v for k, v in gathered_tensors(t.model) if v is not None} for t in pair]
    return losses, weights


@pytest.mark.ranks
@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_layouts_in_one_process(ranks, tiny_model, distributed):
    folder = str(tiny_model("llama_tied"))
    option = dict(distributed_optimizer=distributed)
    specs = [dict(tp=2, sp=True, **option), dict(pp=2, **option), dict(**option)]
    losses, weights = ranks(2, step_pair, folder, specs, 3)[0]
    expected, reference = ranks(1, step_pair, folder, [dict()], 3)[0]
    for history, model in zip(losses, weights, strict=True):
        assert history == pytest.approx(expected[0], rel=1e-5)
        for name, value in reference[0].items():
            torch.testing.assert_close(model[name], value, atol=2e-5, rtol=2e-5)
