"""Layer: pure. Operations are what torch counts in a real model; utilisation follows from them."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_rl.models.families import read_architecture
from megatron_rl.monitor.flops import (
    Workload,
    forward_flops,
    peak_flops,
    phase_flops,
    phase_tokens,
    throughput_metrics,
)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_forward_equals_the_operations_of_transformers(tiny_model, name):
    """torch counts every matrix product of the model; attention there is the full square."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    folder = tiny_model(name)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    arch, length = read_architecture(folder), 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(3, 50, (2, length)))
    ours = forward_flops(
        arch, tokens=2 * length, contexts=2 * length**2, rows=2 * length, vocabulary=True
    )
    counted = counter.get_total_flops()
    rope = 2 * 2 * length * arch.head_dim // 2 * 2  # the outer product that makes the angles
    assert counted - rope <= ours <= counted, (ours, counted)


def test_large_model_agrees_with_six_n(tmp_path, tiny_model_dir):
    """Chowdhery et al.'s 6N for short contexts, on Llama 3.1 8B's shape."""
    shape = json.loads((tiny_model_dir / "config.json").read_text()) | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    arch = read_architecture(tmp_path)
    forward = forward_flops(arch, tokens=1.0, contexts=0.0, rows=1.0, vocabulary=True)
    without_table = arch.parameters() - arch.vocab * arch.hidden
    assert 3 * forward == pytest.approx(6 * without_table, rel=1e-4)
    full = forward_flops(arch, tokens=8192.0, contexts=8192.0**2 / 2, rows=0.0, vocabulary=True)
    no_attention = forward_flops(arch, tokens=8192.0, contexts=0.0, rows=0.0, vocabulary=True)
    assert full - no_attention == pytest.approx(12 * 32 * 32 * 128 * 8192.0**2 / 2 / 3, rel=1e-9)


def test_phases_and_their_rates(tiny_model_dir):
    arch = read_architecture(tiny_model_dir)
    work = Workload(
        prompt_tokens=40.0, response_tokens=60.0, contexts=900.0, generated_tokens=70.0,
        generated_contexts=800.0,
    )  # fmt: skip
    flops = phase_flops({"actor": arch, "critic": arch}, work, epochs=4)
    assert flops["update_actor"] == 12 * flops["old_logprobs"] and "ref_logprobs" not in flops
    assert flops["update_critic"] == 12 * flops["values"] < flops["update_actor"]
    assert flops["generation"] < flops["old_logprobs"], "samples share their prompt"
    tokens = phase_tokens(work, epochs=4)
    assert tokens["generation"] == 60 and tokens["update_actor"] == 400
    metrics = throughput_metrics(
        {"generation": 2.0, "update_actor": 4.0, "scoring": 1.0}, flops, tokens,
        step_seconds=8.0, ranks=2, peak=1e9,
    )  # fmt: skip
    assert metrics["throughput/generation_tokens_per_second"] == 30
    assert metrics["mfu/update_actor"] == pytest.approx(flops["update_actor"] / 4 / 2 / 1e9)
    both = flops["generation"] + flops["update_actor"]
    assert metrics["mfu/step"] == pytest.approx(both / 8 / 2 / 1e9)
    assert metrics["throughput/step_tflops_per_rank"] == pytest.approx(both / 16 / 1e12)
    assert not any("old_logprobs" in tag for tag in metrics), "a phase that did not run"
    unknown = throughput_metrics({}, flops, tokens, step_seconds=1.0, ranks=1, peak=None)
    assert not any(tag.startswith("mfu/") for tag in unknown)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA GB200", "fp16", 2500), ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312), ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GH200 480GB", "bf16", 989),
    ],
)  # fmt: skip
def test_peak_of_known_devices(name, dtype, tflops):
    assert peak_flops(name, dtype) == tflops * 1e12


def test_unknown_device_has_no_peak():
    assert peak_flops("Graphics Adapter", "bf16") is None
