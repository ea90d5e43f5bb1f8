"""Layer: gloo ranks. Logits of every family equal transformers' under every layout (fp32, 1e-4)."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import TINY, VARIANTS

LAYOUTS = {
    "tp1": dict(world=1), "tp2": dict(world=2, tp=2), "tp2_sp": dict(world=2, tp=2, sp=True),
    "pp2": dict(world=2, pp=2), "tp2_pp2": dict(world=4, tp=2, pp=2, sp=True),
    "pp2_vpp2": dict(world=2, pp=2, vpp=2), "tp4": dict(world=4, tp=4),
}  # fmt: skip
# Experts want sequence parallelism with tp > 1.
EXPERT_LAYOUTS = {
    "tp1": dict(world=1), "tp2_sp": dict(world=2, tp=2, sp=True),
    "tp2_ep2": dict(world=2, tp=2, ep=2, sp=True), "pp2": dict(world=2, pp=2),
    "tp2_pp2_ep2": dict(world=4, tp=2, pp=2, ep=2, sp=True),
    "pp2_vpp2": dict(world=2, pp=2, vpp=2), "tp4_ep2": dict(world=4, tp=4, ep=2, sp=True),
    "tp4_ep4": dict(world=4, tp=4, ep=4, sp=True),
}  # fmt: skip
LENGTHS = [5, 17, 1, 9]


def prompts(vocab: int = 259) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab - 3, (n,), generator=generator) for n in LENGTHS]


def our_logits(rank, world, folder, tp, pp, vpp, sp, dtype="fp32", seqs=None, ep=1):
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.engine.microbatch import pack
    from megatron_rl.engine.schedule import forward_only
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    groups = ParallelGroups(layout=Layout(world_size=world, tp=tp, pp=pp, vpp=vpp, ep=ep))
    seed_model_parallel(0, groups)
    arch = read_architecture(folder)
    model = build_model("actor", arch, groups, dtype=dtype, sp=sp)
    load_huggingface(model, folder)
    batches = [
        pack([s], [0], model=model) if s.dim() == 1 else None for s in (seqs or prompts())
    ]
    batches.append(pack(seqs or prompts(), [0] * len(seqs or prompts()), model=model))
    outputs = forward_only(model, batches, lambda logits, batch: logits)
    if not groups.is_last_stage:
        return None
    full = []
    for logits in outputs:
        shards = [torch.empty_like(logits) for _ in range(tp)]
        torch.distributed.all_gather(shards, logits.contiguous(), group=groups.tp)
        full.append(torch.cat(shards, -1)[:, : arch.vocab])
    return full


def reference_logits(folder, seqs):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(s[None]).logits[0] for s in seqs]


MIXTRAL = {("mixtral", layout) for layout in EXPERT_LAYOUTS if layout not in ("tp1", "tp4_ep2")}
# Every model on every layout; of the variants all but the deepest cut are left to the slow tests.
def layouts_of(name: str) -> dict[str, dict]:
    return EXPERT_LAYOUTS if "moe" in name or name == "mixtral" else LAYOUTS


CASES = [
    # Mixtral differs from Qwen3-MoE in what is not cut.
    pytest.param(name, layout, marks=pytest.mark.slow if (name, layout) in MIXTRAL else [])
    for name in sorted(TINY)
    for layout in layouts_of(name)
]
CASES += [
    pytest.param(name, layout, marks=[] if "tp2_pp2" in layout else pytest.mark.slow)
    for name in sorted(VARIANTS)
    for layout in layouts_of(name)
]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_equal_transformers(ranks, tiny_model, name, layout):
    folder = tiny_model(name)
    spec = {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "sp": False, **layouts_of(name)[layout]}
    world = spec.pop("world")
    sizes = [spec[k] for k in ("tp", "pp", "vpp", "sp")]
    results = ranks(world, our_logits, str(folder), *sizes, "fp32", None, spec["ep"])
    ours = next(r for r in reversed(results) if r is not None)
    expected = reference_logits(folder, prompts())
    for got, want in zip(ours[:-1], expected, strict=True):
        torch.testing.assert_close(got[: len(want)], want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours[-1][: sum(LENGTHS)], torch.cat(expected), atol=1e-4, rtol=1e-4)
