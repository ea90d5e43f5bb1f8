"""Layer: pure. A layer of experts equals a loop over tokens, in every way that it is computed."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.models.architecture import Experts
from megatron_rl.models.experts import FREE, _every_expert, choose, expert_outputs

HIDDEN, FFN, COUNT = 16, 24, 6


def weights(generator):
    gate_up = torch.randn(COUNT, 2 * FFN, HIDDEN, generator=generator) / 4
    return gate_up, torch.randn(COUNT, FFN, HIDDEN, generator=generator) / 4


def one_by_one(x, weights_TK, experts_TK, gate_up, down, own):
    """float64, token by token and expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    for t in range(len(x)):
        for weight, expert in zip(weights_TK[t], experts_TK[t].tolist(), strict=True):
            if expert in own:
                gate, up = (gate_up[expert] @ x[t]).chunk(2)
                out[t] += float(weight) * (torch.nn.functional.silu(gate) * up) @ down[expert]
    return out


@pytest.mark.parametrize("own", [range(6), range(2, 4), range(5, 6)])
@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("fixed_size", [False, True])
def test_equals_a_loop_over_tokens(own, tokens, fixed_size):
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    gate_up, down = weights(generator)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    logits = torch.randn(tokens, COUNT, generator=generator)
    chosen = choose(logits, Experts(count=COUNT, per_token=3, normalised=True), None)
    mine = gate_up[own.start : own.stop], down[own.start : own.stop]
    expected = one_by_one(x, *chosen, gate_up, down, own)
    with torch.no_grad():
        got = expert_outputs(x, *chosen, *mine, first=own.start, fixed_size=fixed_size)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
        got = _every_expert(x, chosen[0], chosen[1] - own.start, *mine)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_no_token_for_this_rank_gives_zeros_and_zero_gradients():
    generator = torch.Generator().manual_seed(1)
    gate_up, down = (w.requires_grad_() for w in weights(generator))
    x = torch.randn(5, HIDDEN, generator=generator).requires_grad_()
    routed = torch.zeros(5, 2, dtype=torch.int64), torch.rand(5, 2).requires_grad_()
    out = expert_outputs(x, routed[1], routed[0], gate_up[3:], down[3:], first=3)
    assert not out.any()
    out.sum().backward()
    for tensor in (x, gate_up, down):
        assert tensor.grad is not None and not tensor.grad.any()


@pytest.mark.parametrize("normalised", [False, True])
def test_choice_is_the_largest_probabilities_or_the_routes(normalised):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(9, COUNT, generator=generator)
    experts = Experts(count=COUNT, per_token=2, normalised=normalised)
    weights_TK, experts_TK = choose(logits, experts, None)
    probs = logits.softmax(-1)
    assert torch.equal(experts_TK, probs.topk(2).indices)
    expected = probs.gather(1, experts_TK)
    scale = expected.sum(-1, keepdim=True) if normalised else 1.0
    torch.testing.assert_close(weights_TK, expected / scale)
    routes = torch.stack((torch.arange(9) % COUNT, (torch.arange(9) + 3) % COUNT), 1).short()
    routes[4] = FREE
    weights_TK, replayed_TK = choose(logits, experts, routes)
    assert torch.equal(replayed_TK[4], experts_TK[4])
    assert torch.equal(replayed_TK[:4], routes[:4].long())
    scale = probs.gather(1, replayed_TK).sum(-1, keepdim=True) if normalised else 1.0
    torch.testing.assert_close(weights_TK, probs.gather(1, replayed_TK) / scale)
