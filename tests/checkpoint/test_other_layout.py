"""Layer: gloo ranks. A checkpoint of one layout goes on under another one."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint import resume_case as resume
from tests.engine import training_case as case

ADAM = dict(optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=1.0)
PAIRS = {
    "tp2_pp2_to_tp4": (dict(world=4, tp=2, pp=2), dict(world=4, tp=4), "llama_tied", "fp32"),
    "dp2_to_dp4": (dict(world=2), dict(world=4), "llama", "fp32"),
    "dp2_to_dp4_bf16": (dict(world=2), dict(world=4), "llama_tied", "bf16"),
    "dp4_to_tp2_pp2": (dict(world=4), dict(world=4, tp=2, pp=2), "llama_tied", "fp32"),
    "padded_heads": (dict(world=2, tp=2), dict(world=2, pp=2), "llama_padded_heads", "fp32"),
    "one_kv_head": (dict(world=2, tp=2), dict(world=2), "llama_one_kv_head", "fp32"),
    "vpp": (dict(world=2, pp=2, vpp=2), dict(world=2, tp=2), "qwen3", "fp32"),
    "plain_to_distributed": (
        dict(world=2, distributed_optimizer=False), dict(world=2, pp=2), "llama", "bf16"
    ),
}  # fmt: skip
SLOW = ("padded_heads", "one_kv_head", "vpp", "dp4_to_tp2_pp2")


def build(spec, model, world, dtype):
    return case.build(
        model, world, **{"distributed_optimizer": True, "dtype": dtype, **ADAM, **spec}
    )


def save_and_go_on(rank, world, folder, model, spec, dtype):
    trainable = build(spec, model, world, dtype)
    checkpoints = resume.manager(folder, {"actor": trainable})
    counter = resume.Counter()
    counter.value = 7
    checkpoints.add_state("data", counter)
    for _ in range(3):
        resume.train_step(trainable, 1)
    checkpoints.save(3)
    checkpoints.close()
    return [resume.train_step(trainable, 1) for _ in range(2)]


def resume_and_go_on(rank, world, folder, model, spec, dtype):
    trainable = build(spec, model, world, dtype)
    checkpoints = resume.manager(folder, {"actor": trainable})
    counter = resume.Counter()
    checkpoints.add_state("data", counter)
    assert checkpoints.load() == 3
    checkpoints.close()
    steps = [resume.train_step(trainable, 1) for _ in range(2)]
    return steps, checkpoints.notes, counter.value


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else []) for n in PAIRS]
)
def test_next_losses_and_norms_are_the_same(ranks, tiny_model, tmp_path, name):
    """The second step depends on the optimizer state, so that is carried over, too."""
    before, after, model, dtype = PAIRS[name]
    before, after, model = dict(before), dict(after), str(tiny_model(model))
    expected = ranks(before.pop("world"), save_and_go_on, tmp_path, model, before, dtype)[0]
    results = ranks(after.pop("world"), resume_and_go_on, tmp_path, model, after, dtype)
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for steps, notes, position in results:
        assert position == 7
        for (loss, norm), (want_loss, want_norm) in zip(steps, expected, strict=True):
            assert loss == pytest.approx(want_loss, abs=1e-3)
            assert norm == pytest.approx(want_norm, rel=tolerance)
        assert len(notes) == 1 and "rng" in notes[0] and "does not carry over" in notes[0]


def read_by_megatron(rank, world, folder, model):
    """Megatron-Core's own loader reads the folder: it is a plain torch_dist checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    trainable = build(dict(tp=2), model, world, "fp32")
    checkpoints = resume.manager(folder, {"actor": trainable})
    resume.train_step(trainable, 1)
    path = checkpoints.save(1)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    want = dict(trainable.model.named_parameters())[name].detach()
    shard = ShardedTensor.from_rank_offsets(
        f"actor.{name}", torch.empty_like(want), (0, rank, world), replica_id=0
    )
    got = dist_checkpointing.load({"weight": shard}, str(path / "tensors"))["weight"]
    return torch.equal(got, want)


@pytest.mark.ranks
def test_the_format_is_megatrons(ranks, tiny_model, tmp_path):
    assert all(ranks(2, read_by_megatron, tmp_path, str(tiny_model("llama"))))
