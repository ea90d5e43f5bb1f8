"""Layer: gloo ranks. Going to generation and back moves nothing and needs no memory."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer import run_case

LAYOUTS = {
    "dp2": (2, {}), "tp2_sp": (2, dict(tp=2, sp=True)), "pp2": (2, dict(pp=2)),
    "pp2_vpp2": (2, dict(pp=2, vpp=2)), "tp2_dp2": (4, dict(tp=2)),
    "tp2_pp2": (4, dict(tp=2, pp=2)), "pp2_dp2": (4, dict(pp=2)),
}  # fmt: skip


class Collectives(TorchDispatchMode):
    """Every operation of torch.distributed and the storages that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls.append(func.__name__)
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self.storages |= {x.untyped_storage()._cdata for x in tensors}
        return func(*args, **(kwargs or {}))


def live_bytes() -> int:
    """Bytes of all tensors that exist in this process."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if type(x) in (torch.Tensor, torch.nn.Parameter):
            storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return sum(storages.values())


def run_transition(rank, world, values):
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        trainer.step()
        trained = dict(trainer.models.actor.model.named_parameters())
        addresses = {name: p.data_ptr() for name, p in trained.items()}
        parameters = {p.untyped_storage()._cdata for p in trained.values()}
        before = live_bytes()
        with Collectives() as transition, trainer.rollout.on_generation_layout():
            inside = live_bytes()
            used = dict(trainer.models.transition.engine.model.named_parameters())
            assert {name: p.data_ptr() for name, p in used.items()} == addresses
            moved = list(transition.calls)
            with Collectives() as generation:
                trainer.rollout.generate(
                    trainer.inputs.stream.take(4), n=1, temperature=1.0, first_request=0
                )
            transition.calls.clear()
        assert not generation.storages & parameters, "a parameter was sent while generating"
        after = live_bytes()
        return {"moved": moved, "back": transition.calls, "memory": (before, inside, after),
                "generation": len(generation.calls)}  # fmt: skip
    finally:
        trainer.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if n == "tp2_sp" else pytest.mark.slow) for n in LAYOUTS],
)
def test_nothing_moves(ranks, tiny_model_dir, tmp_path, layout):
    """No collective, the same addresses, not one byte more, at every layout."""
    world, parallel = LAYOUTS[layout]
    values = run_case.settings(str(tiny_model_dir), tmp_path, parallel=parallel)
    for result in ranks(world, run_transition, values):
        assert result["moved"] == [] and result["back"] == []
        before, inside, after = result["memory"]
        assert inside <= before, "the transition took memory"
        assert after <= before + 2**16, "generation left something behind"
        assert result["generation"] > 0, "the counter must see collectives"


def run_overlapped(rank, world, values, finish):
    """Two steps; at the first forward pass of each rollout, weights against the main copy."""
    from megatron_rl import Config, Trainer
    from megatron_rl.generation.runner import Runner

    trainer = Trainer(Config.from_dict(values))
    actor, differences = trainer.models.actor, []
    if not finish:
        actor.finish_param_gather = lambda: None

    def compare() -> int:
        mains = {}
        for part in actor.optimizer.chained_optimizers:
            for models, shards in zip(
                part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True
            ):
                for parameter, main in zip(models, shards, strict=True):
                    start = part._get_model_param_range_map(parameter)["param"].start
                    mains[id(parameter)] = (start, main.detach().clone())
        named = list(actor.model.named_parameters())
        mine = {name: mains[id(p)] for name, p in named if id(p) in mains}
        everyone = [{} for _ in range(world)]
        dist.all_gather_object(everyone, mine)
        wrong, covered = 0, 0
        for name, parameter in named:
            for start, main in (shards[name] for shards in everyone if name in shards):
                flat = parameter.detach().view(-1)[start : start + len(main.view(-1))]
                wrong += int((flat != main.view(-1).to(flat.dtype)).sum())
                covered += len(flat)
        assert covered == sum(p.numel() for _, p in named)
        return wrong

    launch, seen = Runner.launch, []

    def first_run(self, step):
        if id(self) not in seen:
            seen.append(id(self))
            differences.append(compare())
        return launch(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "launch", first_run)
        try:
            metrics = [trainer.step() for _ in range(2)]
            trainer.evaluate()
        finally:
            trainer.close()
    return differences, "perf/param_gather_seconds" in metrics[-1]


@pytest.mark.ranks
def test_a_pending_gather_is_finished_before_the_first_token(ranks, tiny_model_dir, tmp_path):
    """DP2 with overlap_param_gather: all ranks' weights are the optimizer's, rounded to bf16."""
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, training__dtype="bf16",
        parallel=dict(overlap_grad_reduce=True, overlap_param_gather=True),
    )  # fmt: skip
    for differences, timed in ranks(2, run_overlapped, values, True):
        assert timed
        assert len(differences) >= 3 and not any(differences), differences
    stale = ranks(2, run_overlapped, values, False)
    assert any(any(differences) for differences, _ in stale), "the comparison sees no stale weight"
