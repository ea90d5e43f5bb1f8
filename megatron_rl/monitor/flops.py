"""Floating point operations that a step needs, and the model FLOPs utilisation (MFU).

Counted as in appendix B of PaLM (Chowdhery et al. 2022, arXiv:2204.02311): two operations per
multiply-add of every matrix product, three forward passes' worth for forward and backward, nothing
for activations that are computed again. Two things differ from its closed form 6N + 12LHQT, because
they differ in what is computed here: attention is causal, so a token at position t meets t keys and
not the whole context, and the vocabulary projection runs on the rows that a head is asked for (the
responses), not on the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.models.architecture import Architecture
from megatron_rl.models.flops import forward_flops

# Dense peak TFLOP/s in the manufacturers' data sheets: (bf16 and fp16, fp32 outside tensor cores).
# The first name that is part of the device's name counts.
PEAK_TFLOPS = {
    "GB200": (2500, 80), "B200": (2250, 75), "H200": (989, 67), "GH200": (989, 67),
    "H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H100": (989, 67), "H800": (989, 67),
    "H20": (148, 44), "A100": (312, 19.5), "A800": (312, 19.5), "L40S": (362, 91.6),
    "L40": (181, 90.5), "L4": (121, 30.3), "A40": (150, 37.4), "A10": (125, 31.2),
    "MI300X": (1307, 163),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a rollout gives the models to do, summed over all replicas.

    Attributes:
        prompt_tokens, response_tokens: of all samples.
        contexts: keys that all tokens of all samples meet, Σ S² / 2 over samples of S tokens.
        generated_tokens, generated_contexts: the same for generation, where the samples of one
            prompt share its cache.
    """

    prompt_tokens: float
    response_tokens: float
    contexts: float
    generated_tokens: float
    generated_contexts: float

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens


def phase_flops(
    architectures: dict[str, Architecture], work: Workload, epochs: int
) -> dict[str, float]:
    """Operations of each phase that runs models, over all ranks."""
    actor = architectures["actor"]
    full = {"tokens": work.tokens, "contexts": work.contexts, "rows": work.response_tokens}
    actor_forward = forward_flops(actor, **full, vocabulary=True)
    flops = {
        "generation": forward_flops(
            actor, tokens=work.generated_tokens, contexts=work.generated_contexts,
            rows=work.response_tokens, vocabulary=True,
        ),
        "old_logprobs": actor_forward, "update_actor": 3 * epochs * actor_forward,
    }  # fmt: skip
    if "reference" in architectures:
        flops["ref_logprobs"] = forward_flops(architectures["reference"], **full, vocabulary=True)
    if "reward" in architectures:
        flops["scoring"] = forward_flops(architectures["reward"], **full, vocabulary=False)
    if "critic" in architectures:
        forward = forward_flops(architectures["critic"], **full, vocabulary=False)
        flops |= {"values": forward, "update_critic": 3 * epochs * forward}
    return flops


def phase_tokens(work: Workload, epochs: int) -> dict[str, float]:
    """Tokens that each phase works through: generation counts what it generates."""
    passes = {"scoring": 1, "old_logprobs": 1, "ref_logprobs": 1, "values": 1}
    passes |= {"update_critic": epochs, "update_actor": epochs}
    return {"generation": work.response_tokens} | {k: n * work.tokens for k, n in passes.items()}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in operations per second, or None for an unknown one."""
    for name, (half, single) in PEAK_TFLOPS.items():
        if name in device_name:
            return 1e12 * (single if dtype == "fp32" else half)
    return None


def throughput_metrics(
    seconds: dict[str, float], flops: dict[str, float], tokens: dict[str, float], *,
    step_seconds: float, ranks: int, peak: float | None,
) -> dict[str, float]:  # fmt: skip
    """Tokens and operations per second of each phase that ran, and their share of the peak.

    Args:
        seconds: of the slowest rank, by phase.
        peak: operations per second of one device; None leaves the MFU out.
    """
    metrics = {}
    ran = {name: seconds[name] for name in flops if seconds.get(name, 0.0) > 0.0}
    for name, time in ran.items():
        metrics[f"throughput/{name}_tokens_per_second"] = tokens[name] / time
        metrics[f"throughput/{name}_tflops_per_rank"] = flops[name] / time / ranks / 1e12
        if peak is not None:
            metrics[f"mfu/{name}"] = flops[name] / time / ranks / peak
    total = sum(flops[name] for name in ran)
    metrics["throughput/step_tflops_per_rank"] = total / step_seconds / ranks / 1e12
    if peak is not None:
        metrics["mfu/step"] = total / step_seconds / ranks / peak
    return metrics
