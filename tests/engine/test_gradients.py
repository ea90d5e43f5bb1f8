"""Layer: gloo ranks. Raw gradients and updated weights equal plain autograd under every layout.

Raw `main_grad`, not weights after Adam, because Adam hides a constant factor.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine import training_case as case

LAYOUTS = {
    "one_rank": dict(world=1), "dp2_three_unequal_micro_batches": dict(world=2, mbs=1),
    "tp2_pp2_sp": dict(world=4, tp=2, pp=2, sp=True, mbs=4),
    "pp2_vpp2_manual": dict(world=4, pp=2, vpp=2, mbs=2, one_all_reduce=True),
}  # fmt: skip
"""One of each kind for every family; all layouts are compared in test_invariance.py."""
CASES = [
    pytest.param(
        name, layout,
        # The tied model under all layouts is what test_invariance.py compares.
        marks=[] if layout == "one_rank" or (layout == "tp2_pp2_sp" and name != "llama_tied")
        else pytest.mark.slow,
    )
    for name in ("llama", "llama_tied", "llama_padded_heads", "qwen3") for layout in LAYOUTS
]  # fmt: skip
EXPERT_LAYOUTS = {
    # Short micro-batches: a rank whose experts get no token takes part all the same.
    "tp2_ep2": dict(world=2, tp=2, ep=2, sp=True, mbs=1),
    "tp2_ep2_dp2": dict(world=4, tp=2, ep=2, sp=True, mbs=1),
    "tp2_pp2_recompute": dict(world=4, tp=2, pp=2, sp=True, mbs=2, recompute="full"),
    "tp4_ep2": dict(world=4, tp=4, ep=2, sp=True, mbs=2), "pp2": dict(world=2, pp=2, mbs=2),
    "dp2_overlap": dict(world=2, mbs=1, overlap=True),
}  # fmt: skip
CASES += [
    pytest.param(
        name, layout,
        marks=[] if (name, layout) in (("mixtral", "tp2_ep2"), ("qwen3_moe", "tp2_ep2_dp2"))
        else pytest.mark.slow,
    )
    for name in ("mixtral", "qwen3_moe") for layout in EXPERT_LAYOUTS
]  # fmt: skip


def gradients(rank, world, folder, spec):
    from megatron_rl.convert.huggingface import gathered_tensors
    from megatron_rl.engine.schedule import forward_backward

    spec = dict(spec)
    mbs = spec.pop("mbs", 2)
    trainable = case.build(folder, world, **spec)
    model = trainable.model
    trainable.zero_grad()
    batches, count = case.microbatches(model, mbs)
    metrics = forward_backward(model, batches, case.policy_objective(model), count)
    loss = sum((m["loss"] for m in metrics), torch.zeros(()))
    torch.distributed.all_reduce(loss, group=model.groups.dp)
    grads = dict(gathered_tensors(model, value=lambda p: p.main_grad))
    norm = trainable.step().grad_norm
    weights = dict(gathered_tensors(model))
    return (loss.item() if model.groups.is_last_stage else None), grads, norm, weights


@pytest.mark.ranks
@pytest.mark.parametrize("name, layout", CASES)
def test_raw_gradients_equal_autograd(ranks, tiny_model, name, layout):
    spec = dict((LAYOUTS | EXPERT_LAYOUTS)[layout])
    world = spec.pop("world")
    folder = str(tiny_model(name))
    results = ranks(world, gradients, folder, spec)
    loss, expected = case.reference(folder)
    last = next(r for r in results if r[0] is not None)
    assert last[0] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    grads, weights = results[0][1], results[0][3]
    assert set(grads) == set(expected)
    for key, want in expected.items():
        error = (grads[key].double() - want).abs().max() / want.abs().max()
        assert error < 2e-5, f"{key}: relative error {error:.1e}"
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    for rank, result in enumerate(results):
        assert result[2] == pytest.approx(norm, rel=1e-5), f"gradient norm on rank {rank}"
    start = _weights(folder)
    for key, want in expected.items():
        torch.testing.assert_close(
            weights[key].double(), start[key].double() - 0.1 * want, atol=2e-6, rtol=1e-5
        )


def _weights(folder):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return case.as_stored({n: p.detach() for n, p in model.named_parameters()})
