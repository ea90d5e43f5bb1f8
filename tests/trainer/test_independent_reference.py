"""Layer: gloo ranks. Three PPO steps equal a plain transformers + torch PPO in float64: losses,
raw gradients of every optimizer step, and updated weights.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine.invariance_case import complete_gradients, gradient_of
from tests.trainer import run_case
from tests.trainer.plain_ppo import PlainPPO

LR, EPS, KL = 1e-3, 1e-3, 0.05


def steps_with_samples(rank, world, values, count):
    """Runs steps; returns metrics, every sample in the batch's order, the raw gradients of each
    optimizer step, and the final weights."""
    from megatron_rl import Config, Trainer
    from megatron_rl.convert.huggingface import gathered_tensors

    trainer = Trainer(Config.from_dict(values))
    rounds, original = [], trainer._update

    def record(batch):
        rounds.append([
            (int(batch.group_B[i]), i, batch.sequences[i], batch.prompt_lengths[i],
             float(batch.scores_B[i]), bool(batch.finished_B[i]))
            for i in range(len(batch))
        ])  # fmt: skip
        return original(batch)

    trainer._update = record
    trained = {"policy": trainer.models.actor, "value": trainer.models.critic}
    gradients = {name: watch(trainable) for name, trainable in trained.items()}
    try:
        metrics = [trainer.step() for _ in range(count)]
        weights = [
            {k: v for k, v in gathered_tensors(t.model) if v is not None} for t in trained.values()
        ]
        return metrics, rounds, weights, trainer.groups.dp_rank, gradients
    finally:
        trainer.close()


def watch(trainable) -> list[dict[str, torch.Tensor]]:
    """A list that gets the raw gradients of every optimizer step from now on."""
    from megatron_rl.convert.huggingface import gathered_tensors

    found, update = [], trainable.step

    def step():
        complete_gradients(trainable)
        named = gathered_tensors(trainable.model, value=gradient_of)
        found.append({name: g.clone() for name, g in named if g is not None})
        return update()

    trainable.step = step
    return found


def compare_gradients(got: list[dict], want: list[dict], kind: str) -> None:
    """fp32 against float64; the weights behind them drift apart with every update."""
    assert len(got) == len(want) == 12, "three steps of two epochs of two mini-batches"
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        tolerance = 2e-5 if number == 0 else 5e-3
        assert ours.keys() == theirs.keys()
        for name, right in theirs.items():
            error = (ours[name].double() - right).abs().max() / right.abs().max().clamp_min(1e-9)
            assert error < tolerance, f"{kind} gradient {number} of {name}: {error:.1e}"


def ordered(results, step: int) -> list[dict]:
    """All replicas' samples of a step in the order of their number in the run."""
    replicas = {r[3]: r[1][step] for r in results}
    samples = sorted((s for part in replicas.values() for s in part), key=lambda s: (s[0], s[1]))
    return [
        dict(tokens=tokens, prompt=prompt, score=score, finished=finished)
        for _, _, tokens, prompt, score, finished in samples
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world, layout",
    [
        (1, {}),
        pytest.param(4, dict(parallel__tp=2, parallel__sp=True), marks=pytest.mark.slow),
        pytest.param(8, dict(parallel__tp=2, parallel__pp=2), marks=pytest.mark.slow),
    ],
)
def test_three_steps_equal_plain_ppo(ranks, tiny_model, tmp_path, world, layout):
    folder = str(tiny_model("llama"))
    optimizer = {"lr": LR, "eps": EPS, "clip_grad": 1.0}
    values = run_case.settings(
        folder, tmp_path, training__actor=optimizer, training__critic=optimizer,
        algorithm__kl={"placement": "reward", "estimator": "k1", "coef": KL}, **layout,
    )  # fmt: skip
    results = ranks(world, steps_with_samples, values, 3, timeout=500)
    metrics, _, (actor, critic), _, gradients = results[0]
    plain = PlainPPO(folder, lr=LR, eps=EPS, kl_coef=KL)
    for step in range(3):
        samples = ordered(results, step)
        assert len(samples) == 16
        losses = plain.step(samples, [list(range(8)), list(range(8, 16))], epochs=2)
        assert metrics[step]["policy/loss"] == pytest.approx(losses["policy"], rel=1e-3, abs=1e-5)
        assert metrics[step]["value/loss"] == pytest.approx(losses["value"], rel=1e-3, abs=1e-5)
    for kind in ("policy", "value"):
        compare_gradients(gradients[kind], plain.gradients[kind], kind)
    start = dict(PlainPPO(folder, lr=LR, eps=EPS, kl_coef=KL).actor.named_parameters())
    for name, want in plain.actor.named_parameters():
        moved = (want - start[name]).abs().max()
        error = (actor[name].double() - want).abs().max()
        assert error < 0.01 * moved + 1e-6, f"{name}: error {error:.1e}, moved {moved:.1e}"
    for name, want in [*plain.critic.named_parameters(prefix="model"), ("score.weight",
                                                                       plain.head.weight)]:
        torch.testing.assert_close(critic[name].double(), want.detach(), atol=2e-5, rtol=1e-3)
