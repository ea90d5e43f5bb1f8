"""Pure layer: log-prob and entropy allocate fp32 logits for one chunk at a time, both ways."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.algorithms.logprobs import vocab_parallel_logprobs

TOKENS, COLUMNS, CHUNK = 2048, 8192, 128
CHUNK_BYTES = CHUNK * COLUMNS * 4


def peak_bytes(work):
    """Most bytes that `work` held at once beyond what existed before, from allocator events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = work()
    held = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak, result


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_peak_is_a_few_chunks_forward_and_backward(with_entropy, truncated):
    logits = torch.randn(TOKENS, COLUMNS, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(COLUMNS, (TOKENS,))
    min_logit = torch.full((TOKENS,), -1.0) if truncated else None

    def forward():
        return vocab_parallel_logprobs(
            logits,
            labels,
            group=None,
            vocab_start=0,
            vocab_size=COLUMNS,
            chunk=CHUNK,
            with_entropy=with_entropy,
            min_logit_T=min_logit,
        )

    peak, out = peak_bytes(forward)
    assert CHUNK_BYTES <= peak <= 3 * CHUNK_BYTES
    loss = sum(o.sum() for o in out) if with_entropy else out.sum()
    peak, _ = peak_bytes(loss.backward)
    gradient_bytes = TOKENS * COLUMNS * 2
    assert peak <= gradient_bytes + 3 * CHUNK_BYTES
