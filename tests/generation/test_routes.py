"""Layer: gloo ranks. The engine keeps the experts that each token took, wherever its keys go."""

from __future__ import annotations

import pytest
import torch

from tests.generation.test_greedy_equals_transformers import load

NAME, LAYERS, TOP = "qwen3_moe", 4, 3
LENGTHS, NEW = [5, 19, 1, 30, 12, 8], 24


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]


def generated(rank, world, folder, layout, settings, window=None):
    """Tokens and routes of two samples per prompt, and what the session counted."""
    from megatron_rl.generation.engine import Engine, EngineSettings
    from megatron_rl.generation.sequence import SamplingParams
    from megatron_rl.rollout.routes import join_stages

    model = load(folder, world, window=window, **layout)
    engine = Engine(model, EngineSettings(keep_routes=True, **settings))
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=3)
    responses = engine.generate(prompts(), sampling, n=2)
    routes = join_stages(responses, model)
    return [(r.prompt_ids + r.token_ids, x) for r, x in zip(responses, routes, strict=True)], (
        engine.counts.preemptions, engine.counts.shared_blocks,
    )  # fmt: skip


def expected_routes(folder, tokens: list[int]) -> list[torch.Tensor]:
    """Per layer, the experts by transformers' router: bool `[tokens, experts]`, and by how much the
    last one won."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    found = []
    for layer in logits:
        best = layer.topk(TOP + 1, dim=-1)
        mask = torch.zeros_like(layer, dtype=torch.bool).scatter(1, best.indices[:, :TOP], True)
        found.append((mask, best.values[:, TOP - 1] - best.values[:, TOP]))
    return found


def assert_routes(folder, samples) -> None:
    for tokens, routes_LTK in samples:
        assert routes_LTK.shape == (LAYERS, len(tokens) - 1, TOP)
        for layer, (mask_TX, margin_T) in enumerate(expected_routes(folder, tokens)):
            routes_TK = routes_LTK[layer].long()
            ours_TX = torch.zeros_like(mask_TX[:-1]).scatter(1, routes_TK, True)
            same_T = (ours_TX == mask_TX[:-1]).all(-1) | (margin_T[:-1] < 1e-4)
            assert bool(same_T.all()), f"layer {layer}: tokens {(~same_T).nonzero()[:, 0].tolist()}"


CASES = {
    "one_rank": (1, {}, {}), "bursts_ahead": (1, {}, dict(burst=4, steps_ahead=1)),
    "tp2_ep2": (2, dict(tp=2, ep=2, sp=True), {}), "pp2": (2, dict(pp=2), {}),
    "pp2_vpp2": (2, dict(pp=2, vpp=2), {}),
    "plain": (1, {}, dict(cuda_graphs=False)),
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_routes_are_those_of_the_router(ranks, tiny_model, case):
    folder = str(tiny_model(NAME))
    world, layout, settings = CASES[case]
    for samples, _ in ranks(world, generated, folder, layout, settings):
        assert_routes(folder, samples)


@pytest.mark.ranks
@pytest.mark.parametrize("block_size", [8, 6])
def test_routes_survive_preemption_and_shared_prompts(ranks, tiny_model, block_size):
    """Block size 8 runs on the kernels, 6 on plain torch."""
    folder = str(tiny_model(NAME))
    per_block = LAYERS * block_size * (2 * 2 * 16 * 4 + TOP * 2)
    settings = dict(
        block_size=block_size, kv_cache_bytes=per_block * (160 // block_size),
        max_batch_tokens=16, max_running=6,
    )  # fmt: skip
    samples, (preemptions, shared) = ranks(1, generated, folder, {}, settings)[0]
    assert preemptions > 0 and shared > 0
    assert_routes(folder, samples)


@pytest.mark.ranks
def test_tokens_that_left_the_window_are_free(ranks, tiny_model):
    """Their blocks are gone; training lets the router decide about them."""
    folder = str(tiny_model(NAME))
    samples, _ = ranks(1, generated, folder, {}, dict(block_size=4), 32)[0]
    lost = 0
    for _, routes_LTK in samples:
        known_T = (routes_LTK >= 0).all(2).all(0)
        assert bool(known_T[-32:].all()) and bool((routes_LTK >= 0).any(2).all(0).eq(known_T).all())
        lost += int((~known_T).sum())
    assert lost > 0
