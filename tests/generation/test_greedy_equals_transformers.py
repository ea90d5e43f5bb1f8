"""Layer: gloo ranks. Greedy text equals transformers' for every family and layout (fp32).

At a first difference the reference's two best logits must be closer than 1e-4; at most 2 % of the
rows may end so. Outputs with fewer than 8 distinct tokens don't count: they would hide errors.
"""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import TINY

LAYOUTS = {
    "tp1": dict(world=1), "tp2": dict(world=2, tp=2), "tp2_sp": dict(world=2, tp=2, sp=True),
    "pp2": dict(world=2, pp=2), "tp2_pp2": dict(world=4, tp=2, pp=2, sp=True),
    "pp2_vpp2": dict(world=2, pp=2, vpp=2),
}  # fmt: skip
EXPERT_LAYOUTS = {
    "tp2_ep2": dict(world=2, tp=2, ep=2, sp=True), "tp4_ep2": dict(world=4, tp=4, ep=2, sp=True),
    "tp2_pp2_ep2": dict(world=4, tp=2, pp=2, ep=2, sp=True),
}  # fmt: skip
LENGTHS = [4, 19, 1, 33, 16, 8, 19, 40]
NEW = 64


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    made = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]
    made[6] = list(made[1])  # the same prompt twice: its blocks are shared
    return made


def load(folder, world, tp=1, pp=1, vpp=1, ep=1, sp=False, window=None):
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    groups = ParallelGroups(layout=Layout(world_size=world, tp=tp, pp=pp, vpp=vpp, ep=ep))
    seed_model_parallel(0, groups)
    model = build_model("actor", read_architecture(folder), groups, sp=sp, window=window)
    load_huggingface(model, folder)
    return model


def generate(rank, world, folder, layout, settings, sampling):
    from megatron_rl.generation.engine import Engine, EngineSettings
    from megatron_rl.generation.sequence import SamplingParams

    engine = Engine(load(folder, world, **layout), EngineSettings(**settings))
    responses = engine.generate(prompts(), SamplingParams(**sampling))
    return [(r.token_ids, r.logprobs) for r in responses], engine.counts


def reference(folder) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens and the logits they were taken from."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            return_dict_in_generate=True, output_logits=True, eos_token_id=None, pad_token_id=258,
        )  # fmt: skip
        tokens = out.sequences[0, len(prompt) :].tolist()
        rows.append((tokens, torch.stack(out.logits).squeeze(1)))
    return rows


def assert_greedy(ours: list[tuple[list[int], list[float]]], expected) -> None:
    ties = counted = 0
    for (tokens, logprobs), (want, logits) in zip(ours, expected, strict=True):
        if len(set(want)) < 8:
            continue
        counted += 1
        differ = next((i for i in range(NEW) if tokens[i] != want[i]), NEW)
        if differ < NEW:
            best = logits[differ].topk(2).values
            assert best[0] - best[1] < 1e-4, f"token {differ}: {tokens[differ]} != {want[differ]}"
            ties += 1
        expected_logp = logits.log_softmax(-1)[torch.arange(NEW), torch.tensor(want)]
        torch.testing.assert_close(
            torch.tensor(logprobs)[:differ], expected_logp[:differ], atol=1e-4, rtol=1e-4
        )
    assert counted >= 4, "too few outputs with 8 distinct tokens: change the tiny model's scale"
    assert ties <= 0.02 * counted


GREEDY = dict(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)


EXPERTS, SLOW = ("mixtral", "qwen3_moe"), pytest.mark.slow


def quick(number: int, family: str) -> set[str]:
    """Most families on one layout of two ranks, llama also on one rank; slowly all on all."""
    if family in (*EXPERTS, "llama_tied", "llama31"):
        return set()
    of_two = ("tp2_sp", "pp2")[number % 2]
    return {of_two, "tp1"} if family == "llama" else {of_two}


CASES = [
    pytest.param(family, layout, marks=[] if layout in quick(number, family) else slow)
    for slow in [pytest.mark.slow]
    for number, family in enumerate(sorted(TINY))
    for layout in LAYOUTS
]
CASES += [
    pytest.param(name, layout, marks=[] if (name, layout) == ("qwen3_moe", "tp2_ep2") else SLOW)
    for name in EXPERTS
    for layout in EXPERT_LAYOUTS
]


@pytest.mark.ranks
@pytest.mark.parametrize("name, layout", CASES)
def test_greedy_equals_transformers(ranks, tiny_model, name, layout):
    folder = str(tiny_model(name))
    spec = dict((LAYOUTS | EXPERT_LAYOUTS)[layout])
    results = ranks(spec.pop("world"), generate, folder, spec, {}, GREEDY)
    expected = reference(folder)
    for ours, counts in results:
        assert_greedy(ours, expected)
        assert counts.shared_blocks > 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", ["tp1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2_sp", "pp2"))]
)
def test_preemption_and_prefix_sharing_change_nothing(ranks, tiny_model, layout):
    from megatron_rl.models.families import read_architecture

    folder = str(tiny_model("llama"))
    spec = dict(LAYOUTS[layout])
    world = spec.pop("world")
    arch = read_architecture(folder)
    tp, pp = spec.get("tp", 1), spec.get("pp", 1)
    per_block = 2 * (arch.layers // pp) * 8 * (arch.kv_heads // tp) * arch.head_dim * 4
    tight = dict(block_size=8, kv_cache_bytes=per_block * 24, max_batch_tokens=16, max_running=6)
    expected = reference(folder)
    for share in (True, False):
        settings = {**tight, "share_prefixes": share}
        for ours, counts in ranks(world, generate, folder, spec, settings, GREEDY):
            assert_greedy(ours, expected)
            assert counts.preemptions > 0
            assert (counts.shared_blocks > 0) == share
