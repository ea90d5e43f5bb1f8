"""Layer: gloo ranks. One clip, one skip rule, one schedule; every optimizer and dtype trains."""

from __future__ import annotations

import pytest
import torch

from tests.engine import training_case as case


def train(rank, world, folder, spec, steps, poison=None):
    """Some steps; returns losses, norms before clipping, skips, learning rates and weights."""
    from megatron_rl.convert.huggingface import gathered_tensors
    from megatron_rl.engine.schedule import forward_backward

    spec = dict(spec)
    mbs = spec.pop("mbs", 3)
    trainable = case.build(folder, world, **spec)
    model = trainable.model
    objective = case.value_objective if model.head == "value" else case.policy_objective
    batches, count = case.microbatches(model, mbs)
    losses, results, clipped = [], [], []
    for step in range(steps):
        trainable.finish_param_gather()
        trainable.zero_grad()
        metrics = forward_backward(model, batches, objective(model), count)
        loss = sum((m["loss"] for m in metrics), torch.zeros(()))
        torch.distributed.all_reduce(loss, group=model.groups.dp)
        torch.distributed.broadcast(
            loss, model.groups.stage_rank(model.groups.layout.pp - 1), group=model.groups.pp
        )
        losses.append(loss.item())
        if poison == (step, rank):
            next(p for _, p in model.named_parameters()).main_grad.view(-1)[0] = float("nan")
        results.append(trainable.step())
        clipped.append(float(trainable.optimizer.get_grad_norm()))
    trainable.finish_param_gather()
    weights = {k: v for k, v in gathered_tensors(model) if v is not None}
    return losses, results, clipped, weights


def close(a: dict, b: dict, tolerance: float) -> None:
    assert set(a) == set(b)
    for name in a:
        torch.testing.assert_close(a[name].float(), b[name].float(), atol=tolerance, rtol=tolerance)


@pytest.mark.ranks
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_clipped_once_and_logged_before(ranks, tiny_model, dp):
    folder = str(tiny_model("llama_tied"))
    spec = dict(clip_grad=0.01, optimizer="sgd", mbs=2)
    for losses, results, clipped, _ in ranks(dp, train, folder, spec, 1):
        assert results[0].grad_norm > 0.5
        assert clipped[0] == pytest.approx(0.01, rel=1e-3)
        assert losses[0] != 0


@pytest.mark.ranks
@pytest.mark.parametrize("distributed", [True, False])
def test_step_with_nan_is_skipped_on_all_ranks(ranks, tiny_model, distributed):
    folder = str(tiny_model("llama"))
    spec = dict(tp=2, optimizer="adam", lr=1e-3, distributed_optimizer=distributed)
    # The poisoned gradient is on one rank only, after the reduction over data parallel ranks.
    results = ranks(2, train, folder, spec, 3, (1, 0))
    for losses, steps, _, _ in results:
        assert [s.skipped for s in steps] == [False, True, False]
        assert losses[2] == pytest.approx(losses[1], rel=1e-6), "the skipped step changed weights"
        assert losses[1] != losses[0]
    close(results[0][3], results[0][3], 0)


@pytest.mark.ranks
def test_distributed_optimizer_and_overlap_equal_the_plain_one(ranks, tiny_model):
    folder = str(tiny_model("llama"))
    plain = ranks(2, train, folder, dict(optimizer="adam", lr=1e-2), 3)[0]
    for change in (
        dict(distributed_optimizer=True),
        dict(distributed_optimizer=True, overlap=True),
        dict(distributed_optimizer=True, overlap=True, overlap_gather=True),
        dict(overlap=True),
    ):
        other = ranks(2, train, folder, dict(optimizer="adam", lr=1e-2, **change), 3)[0]
        assert other[0] == pytest.approx(plain[0], rel=1e-5), change
        close(other[3], plain[3], 2e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_half_precision_follows_fp32(ranks, tiny_model, dtype):
    """fp32 main weights and reduction; fp16 may skip its first steps until the loss scale fits."""
    folder = str(tiny_model("qwen2"))
    spec = dict(optimizer="adam", lr=1e-4, distributed_optimizer=True)
    full = ranks(1, train, folder, spec, 1)[0]
    for layout in (dict(tp=2, sp=True), dict(pp=2), {}):
        losses, results, _, weights = ranks(
            2, train, folder, {**spec, **layout, "dtype": dtype}, 8
        )[0]
        assert losses[0] == pytest.approx(full[0][0], rel=0.03, abs=0.03)
        assert losses[-1] < losses[0]
        skipped = [r.skipped for r in results]
        assert not any(skipped[-2:]) and (dtype == "fp16" or not any(skipped))
        assert weights["model.norm.weight"].dtype != torch.float32


def main_weights(rank, world, folder):
    """Largest difference between an fp32 main weight and its bf16 copy after tiny steps."""
    trainable = case.build(
        folder, world, dtype="bf16", optimizer="adam", lr=1e-6, distributed_optimizer=False
    )
    from megatron_rl.engine.schedule import forward_backward

    model = trainable.model
    batches, count = case.microbatches(model, 3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(5):
        trainable.zero_grad()
        forward_backward(model, batches, case.policy_objective(model), count)
        trainable.step()
    main = [p.main_param for _, p in model.named_parameters()]
    kept = all(m.dtype == torch.float32 for m in main)
    moved = sum(
        int((m - before[n].float()).count_nonzero())
        for (n, _), m in zip(model.named_parameters(), main, strict=True)
    )
    visible = sum(int((p != before[n]).sum()) for n, p in model.named_parameters())
    return kept, moved, visible


@pytest.mark.ranks
def test_small_updates_survive_in_fp32_main_weights(ranks, tiny_model):
    kept, moved, visible = ranks(1, main_weights, str(tiny_model("llama")))[0]
    assert kept
    assert moved > 10 * visible, "bf16 rounding swallowed the updates"


@pytest.mark.ranks
def test_bf16_critic_trains_alike_on_every_layout(ranks, tiny_model):
    """Its value head is fp32 and zero at first; test_invariance.py compares fp32 critics."""
    folder = str(tiny_model("llama_tied"))
    spec = dict(role="critic", optimizer="adam", lr=1e-2, dtype="bf16")
    one = ranks(1, train, folder, spec, 4)[0]
    assert one[3]["score.weight"].abs().max() > 0
    assert one[3]["score.weight"].dtype == torch.float32
    for change in (dict(tp=2, sp=True), dict(tp=2), dict(pp=2), {}):
        other = ranks(2, train, folder, {**spec, **change}, 4)[0]
        assert other[0] == pytest.approx(one[0], rel=0.05, abs=0.05), change


@pytest.mark.ranks
def test_no_weight_decay_on_norms_and_biases(ranks, tiny_model):
    folder = str(tiny_model("qwen2"))
    spec = dict(optimizer="adam", lr=1e-3)
    without = ranks(1, train, folder, spec, 1)[0][3]
    decayed = ranks(1, train, folder, {**spec, "weight_decay": 100.0}, 1)[0][3]
    for name, value in without.items():
        changed = not torch.equal(value, decayed[name])
        assert changed == (value.dim() > 1), name


def schedule(rank, world, folder):
    from megatron_rl.config.training import OptimizerSettings
    from megatron_rl.engine.optimizer import Trainable

    rates = {}
    for name, settings in {
        "constant": OptimizerSettings(lr=1.0, warmup_steps=2),
        "linear": OptimizerSettings(lr=1.0, min_lr=0.2, schedule="linear"),
        "cosine": OptimizerSettings(lr=1.0, min_lr=0.2, schedule="cosine", warmup_steps=2),
    }.items():
        model = case.build(folder, world).model
        model.wrapped = list(model.chunks)
        trainable = Trainable(model, settings, total_steps=8, distributed_optimizer=False)
        rates[name] = []
        for _ in range(8):
            trainable.zero_grad()
            rates[name].append(trainable.step().lr)
    return rates


@pytest.mark.ranks
def test_learning_rate_schedules(ranks, tiny_model):
    rates = ranks(1, schedule, str(tiny_model("llama_tied")))[0]
    assert rates["constant"] == pytest.approx([0.5] + [1.0] * 7)
    assert rates["linear"] == pytest.approx([1.0 - 0.1 * i for i in range(8)])
    assert rates["cosine"][:2] == pytest.approx([0.5, 1.0])
    assert rates["cosine"] == sorted(rates["cosine"][:1]) + sorted(rates["cosine"][1:])[::-1]
    assert rates["cosine"][-1] < 0.4
