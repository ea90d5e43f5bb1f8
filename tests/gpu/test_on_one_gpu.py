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
