"""Layer: gloo ranks. Generating between training steps changes no bit of the training."""

from __future__ import annotations

import pytest
import torch

from tests.engine import training_case as case


def train_and_generate(rank, world, folder, generate, fail, dtype="fp32"):
    from megatron_rl.engine.schedule import forward_backward
    from megatron_rl.generation.engine import Engine
    from megatron_rl.generation.sequence import SamplingParams
    from megatron_rl.generation.sequence_parallel import sequence_parallel_off

    trainable = case.build(folder, world, tp=2, sp=True, optimizer="adam", lr=1e-2, dtype=dtype)
    model = trainable.model
    engine = Engine(model)
    pointers = [p.data_ptr() for _, p in model.named_parameters()]
    batches, count = case.microbatches(model, 3)
    for _ in range(3):
        trainable.zero_grad()
        forward_backward(model, batches, case.policy_objective(model), count)
        trainable.step()
        if generate:
            engine.generate([[1, 2, 3], [4]], SamplingParams(max_new_tokens=5, ignore_eos=True))
        if fail:
            with pytest.raises(RuntimeError), sequence_parallel_off(model):
                raise RuntimeError("stop in the middle")
    assert pointers == [p.data_ptr() for _, p in model.named_parameters()], "weights were moved"
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_is_bitwise_the_same_with_generation_in_between(ranks, tiny_model, dtype):
    folder = str(tiny_model("llama"))
    plain = ranks(2, train_and_generate, folder, False, False, dtype)
    for generate, fail in ((True, False), (False, True)):
        other = ranks(2, train_and_generate, folder, generate, fail, dtype)
        for a, b in zip(plain, other, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
