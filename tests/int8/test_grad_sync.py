"""Rank layer: int8 reduction in Megatron's buckets, against Megatron's own reduction.

The update of weights by a linear optimizer stands for the gradient: it is whole everywhere.
"""

import types

import pytest
import torch

from tests.engine import training_case as case

LAYOUTS = {
    "dp2": dict(world=2, mbs=1),
    "dp2_sharded": dict(world=2, distributed_optimizer=True),
    "dp2_overlap": dict(world=2, overlap=True, mbs=1),
    "dp2_sharded_overlap": dict(world=2, overlap=True, distributed_optimizer=True, mbs=1),
    "critic_dp2": dict(world=2, role="critic"),
    "tp2_dp2_sp_sharded": dict(world=4, tp=2, sp=True, distributed_optimizer=True),
    "pp2_dp2_tied": dict(world=4, pp=2, mbs=1),
    "pp2_vpp2_dp2_sharded_overlap": dict(
        world=4, pp=2, vpp=2, mbs=1, overlap=True, distributed_optimizer=True
    ),
}


def settings(**changes):
    from megatron_rl.config.training import GradientCompressionSettings

    return GradientCompressionSettings(
        **{"enable": True, "min_bucket_elements": 0, "block_size": 128, **changes}
    )


def train(rank, world, folder, spec, compression, steps=2, poison_at=None, resume_at=None):
    """This rank's weights, gradient norms and compression figures after some steps."""
    from megatron_rl.comm.grad_sync import install
    from megatron_rl.engine.schedule import forward_backward

    spec = dict(spec)
    mbs = spec.pop("mbs", 2)
    sharded = spec.get("distributed_optimizer")
    optimizer = {"optimizer": "adam", "lr": 500.0} if sharded else {"lr": 0.5}
    trainable = case.build(folder, world, **optimizer, **spec)
    if sharded:
        # Megatron shards Adam only; with a huge epsilon it moves weights by lr / eps · momentum.
        for group in trainable.optimizer.param_groups:
            group["eps"] = 1000.0
    model = trainable.model
    objective = case.value_objective if model.head == "value" else case.policy_objective
    installed = []
    if compression is not None:
        installed = [install(chunk, settings(**compression)) for chunk in model.wrapped]
    norms, skipped, bad = [], [], 0
    for step in range(steps):
        if resume_at == step:
            saved = [c.state_dict() for c in installed]
            installed = [install(chunk, settings(**compression)) for chunk in model.wrapped]
            for fresh, state in zip(installed, saved, strict=True):
                fresh.load_state_dict(state)
        trainable.zero_grad()
        batches, count = case.microbatches(model, mbs)
        if poison_at == step and rank == world - 1:
            batches[0].fields["weights"] = batches[0].fields["weights"] * float("inf")
        forward_backward(model, batches, objective(model), count)
        result = trainable.step()
        norms.append(result.grad_norm)
        skipped.append(result.skipped)
        if result.skipped:
            bad += sum(c.step_skipped() for c in installed)
    layout, groups = model.groups.layout, model.groups
    return types.SimpleNamespace(
        weights={name: p.detach().clone() for name, p in model.named_parameters()},
        replica_of=layout.rank_at(tp=groups.tp_rank, dp=0, pp=groups.pp_rank),
        norms=norms, skipped=skipped, bad=bad,
        bytes_sent=sum(c.bytes_sent for c in installed),
        residual=sum(float(r.float().norm()) for c in installed for u in c.units
                     for pair in u.residuals for r in pair if r is not None),
    )  # fmt: skip


def relative_error(got, want, start, dims):
    """Error of the updates of all parameters with `dims` dimensions."""
    keys = [k for k in want if start[k].dim() in dims]
    off = torch.stack([(got[k] - want[k]).norm() for k in keys]).norm()
    return float(off / torch.stack([(want[k] - start[k]).norm() for k in keys]).norm())


@pytest.mark.ranks
@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_is_megatrons_up_to_quantisation(ranks, tiny_model, layout, fusion):
    arguments = dict(LAYOUTS[layout])
    world = arguments.pop("world")
    folder = str(tiny_model("llama_tied" if "tied" in layout else "llama"))
    start = ranks(world, train, folder, arguments, None, 0)
    plain = ranks(world, train, folder, arguments, None)
    ours = ranks(world, train, folder, arguments, {"allreduce_fusion": fusion})
    assert ours[0].bytes_sent > 0
    for mine, theirs, before in zip(ours, plain, start, strict=True):
        assert set(mine.weights) == set(theirs.weights)
        error = relative_error(mine.weights, theirs.weights, before.weights, (2,))
        assert 1e-5 < error < 0.03, error
        assert mine.norms == pytest.approx(theirs.norms, rel=0.02)
        replica = ours[mine.replica_of].weights
        drifted = [key for key in replica if not torch.equal(mine.weights[key], replica[key])]
        assert not drifted


@pytest.mark.ranks
def test_exempt_parameters_travel_in_full_precision(ranks, tiny_model):
    folder, spec = str(tiny_model("llama")), {"mbs": 2}
    start = ranks(2, train, folder, spec, None, 0)[0].weights
    plain = ranks(2, train, folder, spec, None, 1)[0].weights
    ours = ranks(2, train, folder, spec, {"exempt": ["1d", "*embedding*"]}, 1)[0].weights
    assert relative_error(ours, plain, start, (1,)) < 1e-6
    embedding = next(name for name in ours if "embedding" in name)
    torch.testing.assert_close(ours[embedding], plain[embedding], rtol=0, atol=1e-6)
    assert relative_error(ours, plain, start, (2,)) > 1e-5
    everything = ranks(2, train, folder, spec, {"min_bucket_elements": 10**9}, 1)[0].weights
    assert relative_error(everything, plain, start, (1, 2)) < 1e-6


@pytest.mark.ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_inf_skips_the_step_with_a_count(ranks, tiny_model, sharded):
    folder, spec = str(tiny_model("llama")), {"distributed_optimizer": sharded}
    compression = {"error_feedback": True}
    results = ranks(2, train, folder, spec, compression, 3, 1)
    for result in results:
        assert result.skipped == [False, True, False]
        assert result.bad == results[0].bad > 0
        assert all(w.isfinite().all() for w in result.weights.values())
        assert result.residual > 0


@pytest.mark.ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_resuming_changes_no_bit(ranks, tiny_model, sharded):
    """TP2 x DP2 with error feedback and stochastic rounding: continued == never stopped."""
    folder, spec = str(tiny_model("llama")), {"tp": 2, "distributed_optimizer": sharded}
    compression = {"error_feedback": True, "stochastic_rounding": True}
    whole = ranks(4, train, folder, spec, compression, 4)
    resumed = ranks(4, train, folder, spec, compression, 4, None, 2)
    for a, b in zip(whole, resumed, strict=True):
        assert a.norms == b.norms
        assert all(torch.equal(a.weights[k], b.weights[k]) for k in a.weights)


def reload_state(rank, world, folder, changes):
    from megatron_rl.comm.grad_sync import install

    trainable = case.build(folder, world)
    ours = install(trainable.model.wrapped[0], settings(error_feedback=True))
    for unit in ours.units:
        for pair in unit.residuals:
            for residual in pair:
                if residual is not None:
                    residual.fill_(1.0)
    ours.load_state_dict({**ours.state_dict(), **changes})
    pairs = ours.state_dict()["residuals"]
    return sum(float(r.float().abs().sum()) for pair in pairs for r in pair if r is not None)


@pytest.mark.ranks
def test_residuals_reset_when_the_data_parallel_size_changed(ranks, tiny_model):
    folder = str(tiny_model("llama"))
    assert ranks(2, reload_state, folder, {})[0] > 0
    assert ranks(2, reload_state, folder, {"data_parallel_size": [4]})[0] == 0


def refuse(rank, world, folder, changes):
    from megatron_rl.comm.grad_sync import check_interface, install

    trainable = case.build(folder, world)
    messages = []
    for change in changes:
        try:
            install(trainable.model.wrapped[0], settings(**change))
        except ValueError as error:
            messages.append(str(error))

    class Other:
        def start_grad_sync(self, something_else):
            pass

    try:
        check_interface(Other)
    except ImportError as error:
        messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_bad_choices_are_refused(ranks, tiny_model):
    size, interface = ranks(1, refuse, str(tiny_model("llama")), [{"block_size": 64}])[0]
    assert "block_size is 64" in size and "128, 256, 512" in size
    assert "start_grad_sync(self, something_else)" in interface
