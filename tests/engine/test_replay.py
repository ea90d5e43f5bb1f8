"""Layer: gloo ranks. A pass over a rollout takes the experts that its routes name."""

from __future__ import annotations

import pytest
import torch

LENGTHS = [(3, 5), (1, 9), (6, 2), (4, 4)]


def case(folder, world, layout, *, moved_router):
    """An actor, a micro-batch of every sequence with random routes, and its log-probs."""
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.engine.microbatch import pack
    from megatron_rl.engine.schedule import forward_only
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    sp = layout.get("tp", 1) > 1
    groups = ParallelGroups(layout=Layout(world_size=world, **layout))
    seed_model_parallel(0, groups)
    arch = read_architecture(folder)
    model = build_model("actor", arch, groups, sp=sp)
    load_huggingface(model, folder)
    tokens, routes = sequences_and_routes(arch)
    batch = pack(tokens, [p for p, _ in LENGTHS], model=model, routes=routes)
    if moved_router:
        for chunk in model.chunks:
            for layer in chunk.decoder.layers:
                layer.mlp.router.weight.data.neg_()
    logits = forward_only(model, [batch], lambda x, _: x)
    if not groups.is_last_stage:
        return None
    shards = [torch.empty_like(logits[0]) for _ in range(groups.layout.tp)]
    torch.distributed.all_gather(shards, logits[0].contiguous(), group=groups.tp)
    return torch.cat(shards, -1)[: sum(map(sum, LENGTHS)), : arch.vocab]


def sequences_and_routes(arch):
    """Routes that no router would choose; the last token of each sequence has none."""
    generator = torch.Generator().manual_seed(9)
    tokens = [torch.randint(0, 256, (p + r,), generator=generator) for p, r in LENGTHS]
    experts = arch.experts
    routes = [
        torch.rand(arch.layers, len(t) - 1, experts.count, generator=generator)
        .argsort(-1)[..., : experts.per_token].short()
        for t in tokens
    ]  # fmt: skip
    return tokens, routes


def replayed_by_transformers(folder, arch, *, moved_router) -> torch.Tensor:
    """Logits of transformers with its routers told what to choose."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, routes = sequences_and_routes(arch)
    found, current = [], []

    def replay(module, inputs, outputs):
        layer = next(i for i, x in enumerate(model.model.layers) if x.mlp.gate is module)
        hidden = inputs[0].reshape(-1, arch.hidden)
        probs = torch.nn.functional.linear(hidden, module.weight).softmax(-1)
        chosen = outputs[2].clone()
        chosen[: len(current[0][layer])] = current[0][layer].long()
        weights = probs.gather(1, chosen)
        if arch.experts.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return outputs[0], weights, chosen

    for layer in model.model.layers:
        if moved_router:
            layer.mlp.gate.weight.data.neg_()
        layer.mlp.gate.register_forward_hook(replay)
    with torch.no_grad():
        for t, r in zip(tokens, routes, strict=True):
            current[:] = [r]
            found.append(model(t[None]).logits[0])
    return torch.cat(found)


LAYOUTS = {
    "one_rank": (1, {}), "tp2_ep2": (2, dict(tp=2, ep=2)), "tp2": (2, dict(tp=2)),
    "pp2_vpp2": (2, dict(pp=2, vpp=2)),
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("moved_router", [False, True])
def test_routes_are_taken(ranks, tiny_model, layout, moved_router):
    from megatron_rl.models.families import read_architecture

    folder = str(tiny_model("qwen3_moe"))
    world, spec = LAYOUTS[layout]
    results = ranks(world, logits_of_a_rank, folder, spec, moved_router)
    expected = replayed_by_transformers(
        folder, read_architecture(folder), moved_router=moved_router
    )
    ours = next(r for r in results if r is not None)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def logits_of_a_rank(rank, world, folder, spec, moved_router):
    return case(folder, world, spec, moved_router=moved_router)
