"""`runtime.collective_timeout` and `runtime.init_timeout` reach every group. Layer: real ranks."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from megatron_rl import exit_codes
from tests.operate.train_processes import Attempt
from tests.trainer import run_case


def timeouts_of_all_groups(rank, world, values):
    """Seconds, of each backend of each group that exists after one step with a save."""
    from megatron_rl import Config, Trainer
    from megatron_rl.parallel import forget_groups

    forget_groups()  # those of tests before have their own timeouts
    before = set(dist.distributed_c10d._world.pg_map)
    trainer = Trainer(Config.from_dict(values))
    try:
        trainer.step()
        trainer.save()
        found = []
        for group in dist.distributed_c10d._world.pg_map:
            if group in before and group is not dist.group.WORLD:
                continue
            for device in group._device_types:
                options = group._get_backend(device).options
                found.append((group.group_name, options._timeout.total_seconds()))
        return found
    finally:
        trainer.close()
        forget_groups()


@pytest.mark.slow
@pytest.mark.ranks
def test_every_group_has_the_collective_timeout(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, parallel__tp=2, runtime__collective_timeout=1234.0,
    )  # fmt: skip
    for found in ranks(4, timeouts_of_all_groups, values):
        assert len(found) > 10
        assert {seconds for _, seconds in found} == {1234.0}, found


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_never_comes_ends_the_others_after_the_init_timeout(tiny_model_dir, tmp_path):
    values = run_case.settings(str(tiny_model_dir), tmp_path, runtime__init_timeout=3.0)
    attempt = Attempt(tmp_path, values, 2)
    attempt.processes[1].kill()
    start = time.monotonic()
    assert attempt.wait(0, seconds=60) == [exit_codes.CRASH], attempt.said
    assert time.monotonic() - start < 60
    assert "rank 0 failed" in attempt.said
