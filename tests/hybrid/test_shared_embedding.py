"""Layer: gloo ranks. One embedding table in the actor and the critic, whose gradient of it counts
never (read_only) or exactly (joint)."""

from __future__ import annotations

import pytest
import torch

from tests.engine import training_case
from tests.trainer import run_case


def head_weight(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def build_pair(folder, world, share, recompute="none", *, optimizer="adam", distributed=True,
               overlap=False, **layout):  # fmt: skip
    """A trainable actor, a trainable critic with a random head, and what they share."""
    from megatron_rl.config.training import OptimizerSettings
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.engine.optimizer import Trainable
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.models.shared_embedding import SharedEmbedding

    actor = training_case.build(
        folder, world, optimizer=optimizer, distributed_optimizer=distributed, overlap=overlap,
        **layout,
    )  # fmt: skip
    critic = build_model(
        "critic", read_architecture(folder), actor.model.groups, dtype="fp32",
        sp=layout.get("sp", False), recompute=recompute, trainable=True,
    )  # fmt: skip
    load_huggingface(critic, folder, fresh_head=True)
    for chunk in critic.chunks:
        if chunk.post_process:
            chunk.output_layer.weight.data.copy_(head_weight(chunk.output_layer.weight.shape))
    embedding = None
    if share:
        embedding = SharedEmbedding(actor.model, critic, joint=share == "joint")
        assert (embedding.saved_bytes > 0) == critic.groups.is_first_stage
    return actor, Trainable(critic, OptimizerSettings(), total_steps=1), embedding


def backward(trainable, objective):
    from megatron_rl.engine.schedule import forward_backward

    batches, count = training_case.microbatches(trainable.model, 2)
    forward_backward(trainable.model, batches, objective(trainable.model), count)


def gradients(folder, world, share, recompute, **layout):
    """Gradients of a critic whose table is its own or the actor's; none reaches the actor."""
    actor, critic, _ = build_pair(folder, world, share, recompute, **layout)
    actor.zero_grad()
    critic.zero_grad()
    backward(critic, training_case.value_objective)
    assert all(not p.main_grad.any() for _, p in actor.model.named_parameters())
    return {n: p.main_grad.clone() for n, p in critic.model.named_parameters()}


def compare_gradients(rank, world, folder, recompute, layout):
    own = gradients(folder, world, None, "none", **layout)
    read = gradients(folder, world, "read_only", recompute, **layout)
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


def summed_gradient(folder):
    """The table's gradient of both losses together, by transformers and autograd in float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    head_E = head_weight((1, model.config.hidden_size))[0].double()
    weights_BR, (tokens, prompts) = training_case.token_weights(), training_case.sequences()
    parts = {"actor": 0.0, "critic": 0.0}
    for weights_R, ids, prompt in zip(weights_BR.double(), tokens, prompts, strict=True):
        out = model(ids[None], output_hidden_states=True)
        rows = torch.arange(prompt - 1, len(ids) - 1)
        logp = out.logits[0].log_softmax(-1)[rows, ids[rows + 1]]
        values = out.hidden_states[-1][0, rows] @ head_E
        parts["actor"] += (weights_R[: len(rows)] * logp).sum()
        parts["critic"] += (weights_R[: len(rows)] * (values - 1.0).square()).sum()
    table = model.get_input_embeddings().weight
    found = {k: torch.autograd.grad(v, table, retain_graph=True)[0] for k, v in parts.items()}
    assert all(g.abs().max() > 1e-2 for g in found.values()), "each part is seen"
    return found["actor"] + found["critic"]


def joint_step(rank, world, folder, distributed, options):
    """One step of both models; the table's first row here, its gradient, and the table after it."""
    actor, critic, embedding = build_pair(
        folder, world, "joint", options.get("recompute", "none"), distributed=distributed,
        optimizer="adam" if distributed else "sgd",
        **{k: v for k, v in options.items() if k != "recompute"},
    )  # fmt: skip
    critic.zero_grad()
    backward(critic, training_case.value_objective)
    critic.step()
    critic.release_gradients()
    actor.zero_grad()
    embedding.hand_over()
    backward(actor, training_case.policy_objective)
    model = actor.model
    if not model.groups.is_first_stage:
        actor.step()
        return None
    table = model.chunks[0].embedding.word_embeddings.weight
    read = critic.model.chunks[0].embedding.word_embeddings.weight
    before, gradient = table.detach().clone(), table.main_grad.clone()
    actor.step()
    assert read.data_ptr() == table.data_ptr() and read.grad is None
    assert embedding.hand_over() is None and torch.equal(before - table, before - read)
    return model.vocab_start, gradient, before, table.detach().clone()


JOINT = {
    "tp2_sp_recomputed": (2, "llama", False, dict(tp=2, sp=True, recompute="full")),
    "pp2_tied": (2, "llama_tied", False, dict(pp=2)),
    "pp2_vpp2_tied": (2, "llama_tied", False, dict(pp=2, vpp=2)),
    "dp2_overlapped": (2, "llama_tied", False, dict(overlap=True)),
    "dp2_sharded": (2, "llama", True, dict(overlap=True)),
}  # fmt: skip
FAST = ("tp2_sp_recomputed", "pp2_tied", "dp2_sharded")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in JOINT]
)
def test_joint_gradient_is_the_sum_of_both(ranks, tiny_model, name):
    world, variant, distributed, options = JOINT[name]
    folder = str(tiny_model(variant))
    want_VE = summed_gradient(folder)
    for result in filter(None, ranks(world, joint_step, folder, distributed, options)):
        start, gradient, before, after = result
        rows = slice(start, min(start + len(gradient), len(want_VE)))
        want, got = want_VE[rows].float(), slice(0, rows.stop - start)
        if distributed:  # Adam's first step; with sharded states, gradients are whole nowhere
            step = 0.1 * want / (want.abs() + 1e-3)
        else:
            step = 0.1 * want
            scale = float(want.abs().max())
            torch.testing.assert_close(gradient[got], want, rtol=1e-3, atol=2e-5 * scale)
        torch.testing.assert_close((before - after)[got], step, rtol=1e-3, atol=1e-4)


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


def run_jointly(rank, world, values, steps):
    """Metrics of a run; the table stays one, is trained by both, and is saved once."""
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    actor, critic = trainer.models.actor.model, trainer.models.critic.model
    try:
        metrics = [trainer.step() for _ in range(steps)]
        trainer.save()
        first = actor.groups.is_first_stage
        if first:
            tables = [m.chunks[0].embedding.word_embeddings.weight for m in (actor, critic)]
            assert tables[0].data_ptr() == tables[1].data_ptr()
        assert not any(name.startswith("embedding.") for name, _ in critic.named_parameters())
        return metrics
    finally:
        trainer.close()


AWAY = {"enable": True, "offload_device": "cpu"}
WAYS = {
    "tp2": (10, {"parallel": {"tp": 2, "sp": True}}),
    "pp2": (4, {"parallel": {"pp": 2}}),
    "dp2_gathered_late": (
        4, {"parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    ),
    "offloaded": (4, {"hybrid_engine": {"critic_offload": AWAY, "optimizer_offload": AWAY}}),
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_joint_runs_are_the_same_on_every_layout(ranks, tiny_model, tmp_path, way):
    """One table stays one through all steps; one rank and two take the same steps."""
    steps, changes = WAYS[way]
    one, two = (
        run_case.settings(
            str(tiny_model("llama_tied")), tmp_path / name, training__steps=steps,
            **{k: v for k, v in options.items() if k != "hybrid_engine"},
            hybrid_engine={"share_embeddings": "joint", **options.get("hybrid_engine", {})},
        )
        for name, options in (("one", {}), ("two", changes))
    )  # fmt: skip
    expected = ranks(1, run_jointly, one, steps)[0]
    for metrics in ranks(2, run_jointly, two, steps):
        for got, want in zip(metrics, expected, strict=True):
            for name in ("policy/loss", "value/loss", "policy/grad_norm", "reward/mean", "kl/ref"):
                assert got[name] == pytest.approx(want[name], rel=2e-3, abs=2e-5), name


@pytest.mark.ranks
@pytest.mark.slow
def test_joint_and_read_only_are_other_runs(ranks, tiny_model, tmp_path):
    """From the second update on: before, a fresh value head is zero and has no gradient below."""
    norms = []
    for share in ("joint", "read_only"):
        values = run_case.settings(
            str(tiny_model("llama_tied")), tmp_path / share,
            hybrid_engine={"share_embeddings": share},
        )  # fmt: skip
        norms.append([m["policy/grad_norm"] for m in ranks(1, run_case.run, values, 3)[0]])
    assert norms[0][2] != pytest.approx(norms[1][2], rel=1e-4)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_joint_run_resumes_exactly(ranks, tiny_model, tmp_path):
    """The table is in the actor's part of a checkpoint alone, and comes back for both."""
    folder, options = str(tiny_model("llama_tied")), {
        "parallel": {"tp": 2, "sp": True}, "training__steps": 4,
        "hybrid_engine": {"share_embeddings": "joint"},
    }  # fmt: skip
    whole = run_case.settings(folder, tmp_path / "a", **options)
    parts = run_case.settings(folder, tmp_path / "b", **options)
    want = ranks(2, run_jointly, whole, 4)[0]
    got = [m for _ in range(2) for m in ranks(2, run_jointly, parts, 2)[0]]
    for mine, theirs in zip(got, want, strict=True):
        for name in ("policy/loss", "value/loss", "policy/grad_norm", "value/grad_norm"):
            assert mine[name] == theirs[name], name
