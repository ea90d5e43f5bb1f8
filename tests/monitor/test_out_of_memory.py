"""Layer: gloo ranks. A rank out of memory names phase, holders and settings; all ranks end."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config import Config
from megatron_rl.monitor.out_of_memory import Holders, explanation, is_out_of_memory, ways_out
from tests.rank_pool import RankError
from tests.trainer import run_case
from tests.trainer.test_failures import launch, reward_file

GB = 10**9
REAL = "import torch; torch.empty(10**15)"  # the allocator of the host says no


def held(*, rest: int = 0, cache: int = 0, weights: int = 2) -> Holders:
    """A large actor and a critic, in GB."""
    states = {
        (role, kind): factor * weights * GB
        for role in ("actor", "critic")
        for kind, factor in (("weights", 1), ("gradients", 2), ("optimizer", 6))
    }
    states["reference", "weights"] = weights * GB
    return Holders(states=states, rest=rest * GB, cache=cache * GB)


@pytest.mark.parametrize(
    ("phase", "overrides", "holders", "dp", "first"),
    [
        ("update_actor", ["training.dtype=bf16"], held(rest=90), 1, "training.recompute=full"),
        ("update_critic", ["training.dtype=bf16", "training.recompute=full",
                           "training.micro_batch_size=8"],
         held(rest=90), 1, "training.micro_batch_size=4"),
        ("values", ["training.dtype=bf16", "training.max_tokens_per_micro_batch=4096"],
         held(rest=90), 1, "training.max_tokens_per_micro_batch=2048"),
        ("generation", ["training.dtype=bf16"], held(cache=90), 1,
         "rollout.kv_memory_fraction=0.4"),
        ("generation", ["training.dtype=bf16", "rollout.kv_cache_gb=90"], held(cache=90), 1,
         "rollout.kv_cache_gb=45"),
        ("update_actor", ["training.dtype=bf16", "training.grad_reduce=ddp"], held(), 8,
         "training.grad_reduce=distributed_optimizer"),
        ("startup", ["training.dtype=fp32"], held(rest=50), 1, "training.dtype=bf16"),
        ("ref_logprobs", ["training.dtype=bf16"], held(weights=9), 2,
         "hybrid_engine.optimizer_offload={enable: true, offload_device: cpu}"),
    ],
)  # fmt: skip
def test_ways_out_start_with_what_saves_most(phase, overrides, holders, dp, first):
    base = {"model": {"actor": {"path": "m"}}, "data": {"train": "t"}}
    config = Config.from_dict(base).with_overrides(overrides)
    ways = ways_out(config, holders, phase, dp)
    assert ways[0][0] == first, ways
    assert len(ways) >= 3 and [w[1] for w in ways] == sorted((w[1] for w in ways), reverse=True)
    for what, saved in ways:
        assert saved <= holders.of("weights", "gradients", "optimizer") + holders.rest + 90 * GB
        config.with_overrides([what.removesuffix(" on twice as many ranks")])


def test_message_has_everything_that_helps():
    ways = [("training.recompute=full", 20 * GB), ("b=1", 3 * GB), ("c=2", 2 * GB), ("d=3", GB)]
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
    text = str(
        explanation(error, rank=13, phase="update_actor", holders=held(rest=40), ways=ways)
    )
    assert text.startswith(
        "rank 13 ran out of memory in phase update_actor. It holds: activations and everything "
        "else 40.00 GB, optimizer of the actor 12.00 GB, optimizer of the critic 12.00 GB"
    )
    assert "training.recompute=full (about 20.00 GB); b=1 (about 3.00 GB); c=2" in text
    assert "d=3" not in text and text.endswith("(CUDA out of memory. Tried to allocate 2 GiB)")


def test_only_memory_errors_are_explained():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as real:
        torch.empty(10**15)
    assert is_out_of_memory(real.value)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def measured(rank, world, values):
    """Holders after a step, in bytes, with the actor's parameters."""
    from megatron_rl import Config, Trainer
    from megatron_rl.monitor.out_of_memory import measure_holders

    trainer = Trainer(Config.from_dict(values))
    try:
        trainer.step()
        models = trainer.models
        models.actor.zero_grad()  # gradient buffers exist during the update only
        holders = measure_holders(
            [models.actor, models.critic], [models.reference], models.engine, "generation",
            torch.device("cpu"),
        )  # fmt: skip
        parameters = sum(p.numel() for _, p in models.actor.model.named_parameters())
        return parameters, holders.states, holders.cache, holders.rest
    finally:
        trainer.close()


@pytest.mark.ranks
def test_holders_are_the_bytes_of_a_real_run(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(str(tiny_model_dir), tmp_path, training__grad_reduce="ddp")
    ((parameters, states, cache, rest),) = ranks(1, measured, values)
    weights = 4 * parameters
    for role in ("actor", "reference"):
        assert weights <= states[role, "weights"] <= 1.1 * weights
    assert weights <= states["actor", "gradients"] <= 1.1 * weights
    assert 2 * weights <= states["actor", "optimizer"] <= 2.2 * weights, "Adam's two moments"
    assert cache > 0 and rest > 0


@pytest.mark.ranks
def test_error_in_a_phase_names_it(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, reward={"function": reward_file(tmp_path, REAL)}
    )
    with pytest.raises(RankError) as error:
        ranks(1, run_case.run, values, 1)
    text = str(error.value)
    assert "rank 0 ran out of memory in phase scoring. It holds: activations" in text
    assert "weights of the actor" in text and "What would save most here: " in text
    assert "can't allocate memory" in text, "the first error is shown too"


@pytest.mark.ranks
@pytest.mark.slow
def test_one_rank_without_memory_ends_all(tiny_model_dir, tmp_path):
    body = f"import os\n    if os.environ['RANK'] == '1' and calls == 2: {REAL}"
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, training__steps=5, training__epochs=1,
        reward={"function": reward_file(tmp_path, body)},
    )  # fmt: skip
    process = launch(tmp_path, values, 2)
    _, error = process.communicate(timeout=240)
    assert process.returncode not in (0, 2, 75)
    assert "rank 1 ran out of memory in phase scoring" in error
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_full_gpu_is_explained(tiny_model_dir, tmp_path, fresh_process):
    body = "import torch; torch.empty(10**15, dtype=torch.uint8, device='cuda')"
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, reward={"function": reward_file(tmp_path, body)},
        runtime__device="cuda",
    )  # fmt: skip
    with pytest.raises(
        RuntimeError, match="rank 0 ran out of memory in phase scoring. It holds: activations"
    ):
        fresh_process(run_case.run, 0, 1, values, 1)
