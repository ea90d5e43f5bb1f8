"""Layer: gloo ranks. No layout changes a gradient, a metric, a log-prob or an updated weight.

One rank is the measure; tests/engine/test_gradients.py and tests/trainer/ compare one rank with
plain autograd. Raw gradients, not weights after Adam, because Adam hides a constant factor.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
import transformers

from tests.engine import invariance_case as case
from tests.engine.mutations import MUTATIONS
from tests.tiny_models import write_tiny_model

COVERING = case.covering_set()
SAMPLE_OF_PRODUCT = os.environ.get("MEGATRON_RL_LAYOUTS", "20")  # "all": hours


def label(spec: dict) -> str:
    packing = "packed" if spec["packing"] else "padded"
    return "-".join(str(spec[k]) if k != "packing" else packing for k in case.AXES).replace(
        "distributed_optimizer", "distopt"
    )


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory) -> tuple[str, str]:
    """The trained model (tied embeddings), and another one as the reference."""
    other = write_tiny_model("llama_tied", tmp_path_factory.mktemp("reference"), seed=1)
    return str(tiny_model("llama_tied")), str(other)


@pytest.fixture(scope="module")
def one_rank(ranks, folders):
    """`one_rank(optimizer)`: what a single rank computes; and the rollout's log-probs."""
    logp_BR = ranks(1, case.actor_logprobs, folders[0])[0]
    done: dict[str, dict] = {}

    def measured(optimizer: str) -> dict:
        if optimizer not in done:
            spec = {**case.ONE_RANK, "optimizer": optimizer}
            done[optimizer] = ranks(1, case.measure, *folders, spec, logp_BR)[0]
        return done[optimizer]

    return measured, logp_BR


def compare(ranks, folders, one_rank, spec: dict, mutation: str | None = None) -> list[str]:
    measured, logp_BR = one_rank
    # Megatron's distributed optimizer knows Adam only; with an eps of 1e-3 it follows the gradient.
    optimizer = "adam" if spec["reduce"] == "distributed_optimizer" else "sgd"
    results = ranks(
        case.world_size(spec), case.measure, *folders, {**spec, "optimizer": optimizer}, logp_BR,
        mutation,
    )  # fmt: skip
    return case.differences(results, measured(optimizer))


def test_covering_set_has_every_pair():
    every = set().union(*(case.pairs(spec) for spec in case.product()))
    assert set().union(*(case.pairs(spec) for spec in COVERING)) == every
    assert len(COVERING) < 20


@pytest.mark.ranks
def test_the_objectives_have_something_to_differ_in(one_rank):
    for objective, found in one_rank[0]("sgd").items():
        assert len(found["gradients"]) == len(found["weights"]) > 30
        assert all(g.abs().max() > 1e-6 for g in found["gradients"].values()), objective
    metrics = one_rank[0]("sgd")["ppo_actor"]["metrics"]
    assert metrics["clipfrac"] > 0.1 and metrics["dual_clipfrac"] > 0 and metrics["kl_loss"] > 0
    assert one_rank[0]("sgd")["grpo"]["metrics"]["kl"] > 0.1, "the full KL"
    assert one_rank[0]("sgd")["grpo"]["metrics"]["ratio"] == 1.0


def plain_grpo(folder: str, reference_folder: str, rollout_BR: torch.Tensor) -> dict:
    """GRPO's gradients with the exact KL, by transformers and autograd in float64.

    The mean over responses of the mean of −A·r·min(π / π_rollout, cap) + coef·KL(π ‖ reference).
    """
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, reference = (load(f, dtype=torch.float64) for f in (folder, reference_folder))
    sequences, draw, mask_BR = case.rollout()
    total = torch.zeros((), dtype=torch.float64)
    for i, (tokens, (prompt, length)) in enumerate(zip(sequences, case.LENGTHS, strict=True)):
        logp_RV, other_RV = (
            (m(tokens[None]).logits[0, prompt - 1 : -1] / 0.9).log_softmax(-1)
            for m in (model, reference)
        )
        kl_R = (logp_RV.exp() * (logp_RV - other_RV.detach())).sum(-1)
        logp_R = logp_RV.gather(1, tokens[prompt:, None]).squeeze(1)
        ratio_R = (logp_R - logp_R.detach()).exp()
        weight_R = (logp_R.detach() - rollout_BR[i, :length].double()).exp().clamp(max=1.02)
        loss_R = -draw["advantages"][i, :length] * ratio_R * weight_R + 0.2 * kl_R
        live_R = mask_BR[i, :length].bool()
        total = total + loss_R[live_R].mean() / len(sequences)
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.ranks
def test_one_rank_equals_plain_autograd_with_the_full_kl(folders, one_rank):
    measured, logp_BR = one_rank
    gradients = measured("sgd")["grpo"]["gradients"]
    expected = plain_grpo(*folders, logp_BR + case.rollout()[1]["drift"])
    assert gradients.keys() == expected.keys()
    for name, want in expected.items():
        error = (gradients[name].double() - want).abs().max() / want.abs().max()
        assert error < 2e-5, f"{name}: {error:.1e}"


@pytest.mark.ranks
@pytest.mark.parametrize("spec", COVERING, ids=label)
def test_no_layout_changes_a_gradient(ranks, folders, one_rank, spec):
    assert compare(ranks, folders, one_rank, spec) == []


@pytest.mark.ranks
@pytest.mark.slow
def test_a_sample_of_the_full_product_changes_no_gradient(ranks, folders, one_rank):
    """The product has over a thousand layouts: another sample of them on every run, or `all`."""
    seed = random.randrange(10**6)
    wrong = {}
    count = len(case.product()) if SAMPLE_OF_PRODUCT == "all" else int(SAMPLE_OF_PRODUCT)
    for spec in random.Random(seed).sample(case.product(), count):
        if found := compare(ranks, folders, one_rank, spec):
            wrong[label(spec)] = found[:3]
    assert not wrong, f"seed {seed}: {wrong}"


@pytest.fixture(scope="module")
def right_layouts() -> set[str]:
    """Layouts that were compared without a mutation."""
    return set()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_turns_the_comparison_red(ranks, folders, one_rank, right_layouts, mutation):
    spec = {**case.ONE_RANK, **MUTATIONS[mutation][0]}
    if label(spec) not in right_layouts:
        assert compare(ranks, folders, one_rank, spec) == [], "wrong without the mutation, too"
        right_layouts.add(label(spec))
    assert compare(ranks, folders, one_rank, spec, mutation), f"{mutation} went unnoticed"
