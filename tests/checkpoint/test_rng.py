"""Layer: one gloo rank. Every generator goes on with the numbers it would have drawn."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.checkpoint import RngState
from megatron_rl.checkpoint.rank_files import read_rank_file, snapshot, write_rank_file
from tests.checkpoint import resume_case as resume


def through_a_file(rank, world, path):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    groups = ParallelGroups(layout=Layout(world_size=world))
    tracker = get_cuda_rng_tracker()
    seed_model_parallel(5, groups)
    resume.draws()
    tracked = {name: state.clone() for name, state in tracker.get_states().items()}
    tensors: dict = {}
    write_rank_file(path, snapshot(RngState().state_dict(), tensors), tensors)
    expected = [resume.draws() for _ in range(3)]
    seed_model_parallel(6, groups)
    assert all(not torch.equal(s, tracked[n]) for n, s in tracker.get_states().items())
    RngState().load_state_dict(read_rank_file(path))
    same = [torch.equal(s, tracked[n]) for n, s in tracker.get_states().items()]
    return expected, [resume.draws() for _ in range(3)], same


@pytest.mark.ranks
def test_all_generators_go_on(ranks, tmp_path):
    ((expected, found, tracker),) = ranks(1, through_a_file, tmp_path / "r.safetensors")
    assert expected == found
    assert len(tracker) >= 2 and all(tracker)
