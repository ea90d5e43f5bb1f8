"""Layers: pure, then gloo ranks. Weights and optimizer states away from the device between uses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.training import OffloadSettings
from megatron_rl.engine.offload import Offloaded
from megatron_rl.models.architecture import Architecture, Rope
from megatron_rl.residency import check_host_memory, host_bytes_needed
from tests.trainer import run_case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON = {"enable": True, "offload_device": "cpu"}


def settings(**changes) -> OffloadSettings:
    return OffloadSettings(**{**ON, **changes})


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pinned", [True, False])
def test_bits_and_bytes_are_the_same_over_cycles(threads, pinned):
    """Views of one storage travel once; addresses may change, contents and sizes may not."""
    whole = torch.randn(3000, 7, device=DEVICE)
    views = [whole[:1000], whole[1000:].view(-1)]
    other = torch.randn(33, device=DEVICE).bfloat16()
    expected = [x.clone() for x in (*views, other)]
    part = Offloaded("x", lambda: [*views, other], settings(num_threads=threads, pin_memory=pinned))
    sizes = set()
    for _ in range(5):
        part.offload()
        assert part.device_bytes == 0 == whole.untyped_storage().nbytes()
        part.prefetch()
        part.load()
        sizes.add((part.device_bytes, part.host_bytes))
        assert all(torch.equal(a, b) for a, b in zip((*views, other), expected, strict=True))
        other.add_(1)
        expected[-1].add_(1)
    assert sizes == {(whole.nbytes + other.nbytes,) * 2}


def test_use_while_away_raises():
    weight = torch.randn(8, 8, device=DEVICE)
    part = Offloaded("x", lambda: [weight], settings())
    part.offload()
    if DEVICE.type == "cpu":
        with pytest.raises(RuntimeError, match="storage of size 0"):
            torch.nn.functional.linear(torch.ones(2, 8), weight)
    part.load()
    assert torch.nn.functional.linear(torch.ones(2, 8, device=DEVICE), weight).isfinite().all()


def test_frozen_weights_are_copied_to_the_host_once():
    weight = torch.ones(8, device=DEVICE)
    part = Offloaded("x", lambda: [weight], settings(), frozen=True)
    part.offload()
    part.load()
    weight.fill_(2)  # nobody does this to a frozen model: it shows that the copy is the first one
    part.offload()
    part.load()
    assert (weight == 1).all()


def test_states_that_appear_later_are_found():
    tensors = [torch.ones(4, device=DEVICE)]
    part = Offloaded("x", lambda: tensors, settings())
    part.offload()
    part.load()
    tensors.append(torch.full((5,), 3.0, device=DEVICE))
    part.offload()
    assert part.device_bytes == 0 and part.host_bytes == 4 * 9
    part.load()
    assert (tensors[1] == 3).all()


ALL = {f"{n}_offload": ON for n in ("actor", "critic", "reference", "optimizer")}


def run_saving(rank, world, values, steps):
    """Saves a checkpoint after every step and in the middle of the second; metrics and parts."""
    from megatron_rl import Trainer

    trainer = Trainer(Config.from_dict(values))
    evaluate, seen = trainer._evaluate_policies, []

    def evaluated(batch):
        evaluate(batch)
        trainer.save()

    try:
        metrics = []
        for step in range(steps):
            trainer._evaluate_policies = evaluated if step == 1 else evaluate
            metrics.append(trainer.step())
            trainer.residency.rest()
            seen.append({n: (p.device_bytes, p.host_bytes)
                         for n, p in trainer.residency.parts.items()})  # fmt: skip
            trainer.save()
        if trainer.residency.parts:
            trainer.residency.rest()
            with pytest.raises(RuntimeError, match="the reference is used while it is offloaded"):
                trainer.models.reference.chunks[0]()
        return metrics, seen
    finally:
        trainer.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {}),
        pytest.param(2, {"training__dtype": "bf16", "parallel": {
            "overlap_grad_reduce": True, "overlap_param_gather": True}}, marks=pytest.mark.slow),
        pytest.param(2, {"parallel": {"tp": 2}, "training__dtype": "bf16",
                         "training__grad_reduce": "ddp"}, marks=pytest.mark.slow),
        pytest.param(2, {"parallel": {"tp": 2}, "micro_dp": True}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ppo_is_the_same_with_everything_offloaded(ranks, tiny_model_dir, tmp_path, world, changes):
    """Bitwise equal metrics, a checkpoint in any phase, constant bytes."""
    changes = dict(changes)
    more = {"mode": "micro_dp", "generation_tp": 1} if changes.pop("micro_dp", False) else {}
    folder = str(tiny_model_dir)
    plain = run_case.settings(folder, tmp_path / "a", **changes, hybrid_engine=more)
    away = run_case.settings(folder, tmp_path / "b", **changes, hybrid_engine={**ALL, **more})
    want, got = (ranks(world, run_saving, values, 3) for values in (plain, away))
    for (wanted, _), (found, seen) in zip(want, got, strict=True):
        for a, b in zip(wanted, found, strict=True):
            names = [n for n in a if n.startswith(("policy/", "value/", "kl/", "reward/"))]
            assert {n: a[n] for n in names} == {n: b[n] for n in names}
        assert seen[1] == seen[2], "host memory grows"
        assert all(device == 0 for part in seen for device, _ in part.values())
        assert set(seen[0]) >= {"actor", "critic", "reference", "actor_optimizer"}


def architecture() -> Architecture:
    return Architecture(
        family="llama", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336,
        vocab=128256, tied=False, norm_eps=1e-5, max_positions=8192, rope=Rope(),
    )  # fmt: skip


def config(**engine) -> Config:
    return Config.from_dict({
        "model": {"actor": {"path": "x"}}, "data": {"train": "y"}, "parallel": {"tp": 2},
        "training": {"dtype": "bf16"}, "hybrid_engine": engine,
    })  # fmt: skip


def test_host_memory_is_counted_and_refused_with_the_bytes():
    """8.03 G parameters over tp 2: bf16 weights, and 12 bytes of optimizer over dp 4."""
    arch = architecture()
    n = arch.parameters()
    run = config(reference_offload=ON, optimizer_offload=ON)
    roles = dict.fromkeys(("actor", "critic", "reference"), arch)
    needed = host_bytes_needed(run, roles, 8)
    assert needed == {
        "hybrid_engine.reference_offload": n, "hybrid_engine.optimizer_offload": 2 * 3 * n // 2,
    }  # fmt: skip
    total = 8 * sum(needed.values())
    check_host_memory(run, roles, world_size=8, local_ranks=8, available=total)
    with pytest.raises(ConfigError, match=str(total)) as refusal:
        check_host_memory(run, roles, world_size=8, local_ranks=8, available=total - 1)
    assert refusal.value.setting == "hybrid_engine.optimizer_offload.enable"
    check_host_memory(config(), roles, world_size=8, local_ranks=8, available=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_device_memory_is_really_given_back():
    weight = torch.randn(64 * 2**20, device="cuda")
    part = Offloaded("x", lambda: [weight], dataclasses.replace(settings()))
    before = torch.cuda.memory_allocated()
    part.offload()
    assert torch.cuda.memory_allocated() <= before - weight.nbytes
    part.load()
    assert torch.cuda.memory_allocated() == before
