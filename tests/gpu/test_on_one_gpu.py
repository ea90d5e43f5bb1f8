"""Layer: one GPU. The same code on CUDA: logits, greedy text, PPO steps, bf16 drift."""

from __future__ import annotations

import pytest
import torch

from tests.generation.test_greedy_equals_transformers import GREEDY, assert_greedy, reference
from tests.generation.test_greedy_equals_transformers import generate as our_greedy
from tests.models.test_logits_equal_transformers import our_logits, prompts, reference_logits
from tests.trainer import run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    torch.cuda.set_device(0)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama31", "mixtral", "qwen3_moe"])
def test_logits_equal_transformers(tiny_model, name):
    folder = str(tiny_model(name))
    ours = our_logits(0, 1, folder, 1, 1, 1, False)
    for got, want in zip(ours, reference_logits(folder, prompts()), strict=False):
        torch.testing.assert_close(got.cpu()[: len(want)], want, atol=2e-4, rtol=2e-4)


def test_bf16_packed_equals_single_sequences(tiny_model):
    """torch's varlen attention: no cross-talk between packed sequences."""
    ours = our_logits(0, 1, str(tiny_model("llama")), 1, 1, 1, False, dtype="bf16")
    singles = torch.cat([x[:n] for x, n in zip(ours, (5, 17, 1, 9), strict=False)]).float()
    packed = ours[-1][: len(singles)].float()
    assert (singles - packed).norm() / singles.norm() < 0.02


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_greedy_equals_transformers(tiny_model, name):
    folder = str(tiny_model(name))
    ours, _ = our_greedy(0, 1, folder, {}, {}, GREEDY)
    assert_greedy(ours, reference(folder))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ppo_steps(tiny_model, tmp_path, dtype, name):
    values = run_case.settings(
        str(tiny_model(name)), tmp_path, runtime__device="cuda", training__dtype=dtype,
        training__steps=5,
    )  # fmt: skip
    steps = run_case.run(0, 1, values, 5)
    for metrics in steps:
        assert metrics["policy/skipped_steps"] == 0
        assert dtype == "bf16" or abs(metrics["policy/ratio"] - 1) < 0.5
    drift = [m["drift/mean_abs"] for m in steps]
    print(f"{dtype}: mean |Δlogp| between generation and training {max(drift):.2e}")
    assert max(drift) < (1e-4 if dtype == "fp32" else 0.2)


def generated(engine, *, graphs):
    """Greedy tokens and log-probs of three prompts, and seconds of capture."""
    from megatron_rl.generation.engine import Engine, EngineSettings
    from megatron_rl.generation.sequence import SamplingParams

    engine = Engine(engine.model, EngineSettings(cuda_graphs=graphs))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    responses = engine.generate([[3, 4, 5], [9, 8], list(range(30, 50))], sampling)
    tokens, logprobs = ([getattr(r, x) for r in responses] for x in ("token_ids", "logprobs"))
    assert (engine.counts.capture_seconds > 0) == graphs
    return tokens, torch.tensor(logprobs)


@pytest.mark.parametrize("offloaded", [False, True], ids=["stay", "offloaded"])
def test_captured_passes_see_every_update(tiny_model, tmp_path, offloaded):
    """After each optimizer step, with the weights' storage given up and taken anew in between or
    not, passes captured as graphs give what eager ones give."""
    from megatron_rl import Config, Trainer

    changes = {
        f"hybrid_engine__{name}_offload": {"enable": True, "offload_device": "cpu"}
        for name in (("actor", "optimizer") if offloaded else ())
    }
    values = run_case.settings(
        str(tiny_model("llama")), tmp_path, runtime__device="cuda", training__dtype="fp32",
        training__steps=3, rollout__max_new_tokens=20, **changes,
    )  # fmt: skip
    trainer = Trainer(Config.from_dict(values))
    try:
        engine, seen = trainer.models.transition.engine, []
        for _ in range(3):
            metrics = trainer.step()
            assert engine.counts.capture_seconds > 0, "the rollout ran on graphs"
            assert metrics["drift/mean_abs"] < 1e-4, "log-probs of training, same weights"
            with trainer.residency.on_device("actor"):
                tokens, logprobs = generated(engine, graphs=True)
                expected, eager = generated(engine, graphs=False)
            assert tokens == expected
            torch.testing.assert_close(logprobs, eager, atol=1e-4, rtol=1e-4)
            seen.append(logprobs)
        assert all((a - b).abs().max() > 1e-2 for a, b in zip(seen, seen[1:], strict=False))
    finally:
        trainer.close()


def test_a_graph_reads_weights_that_change_under_it(tiny_model):
    """Within one session: the graph holds the weights' addresses, not their values."""
    from megatron_rl.generation.engine import Engine, EngineSettings
    from megatron_rl.generation.sequence import SamplingParams
    from tests.generation.test_greedy_equals_transformers import load

    model = load(str(tiny_model("llama")), 1)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)

    def tokens(graphs):
        generator = torch.Generator("cuda").manual_seed(5)
        weights = [p for _, p in model.named_parameters()]
        kept = [p.detach().clone() for p in weights]
        engine = Engine(model, EngineSettings(cuda_graphs=graphs, burst=4, steps_ahead=0))
        with engine.open() as session:
            sequence = engine.request(session, 0, [3, 4, 5], sampling)
            for step in range(11):
                session.step()
                if step == 4:  # graphs have been captured and replayed
                    with torch.no_grad():
                        for p in weights:
                            p += 0.05 * torch.randn(p.shape, device="cuda", generator=generator)
            assert session.finished
        with torch.no_grad():
            for p, before in zip(weights, kept, strict=True):
                p.copy_(before)
        return sequence.tokens, engine.counts.capture_seconds

    (captured, seconds), (eager, _) = tokens(True), tokens(False)
    assert seconds > 0 and captured == eager
