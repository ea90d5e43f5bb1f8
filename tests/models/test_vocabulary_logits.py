"""Layer: pure. Logits of half precision factors keep their fp32 sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.models.heads import vocabulary_logits


def factors(dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 96, generator=generator) for n in (7, 40))
    return (x.to(device, dtype).requires_grad_() for x in (hidden, weight))


def check(device: str, dtype: torch.dtype) -> None:
    hidden, weight = factors(dtype, device)
    exact = hidden.double() @ weight.double().t()
    logits = vocabulary_logits(hidden, weight)
    rounded = vocabulary_logits(hidden, weight, fp32=False)
    assert logits.dtype == torch.float32 and rounded.dtype == dtype
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=1e-5)
    error = (rounded.double() - exact).abs().mean()
    assert error > 20 * (logits.double() - exact).abs().mean(), "rounding is what is spared"
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(device)
    logits.backward(grad)
    got = hidden.grad, weight.grad
    want = torch.autograd.grad(F.linear(hidden, weight), (hidden, weight), grad.to(dtype))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_products_keep_fp32_sums(dtype):
    check("cpu", dtype)


def test_fp32_is_an_ordinary_linear_layer():
    hidden, weight = factors(torch.float32)
    assert torch.equal(vocabulary_logits(hidden, weight), F.linear(hidden, weight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_half_precision_products_keep_fp32_sums_on_the_gpu():
    check("cuda", torch.bfloat16)
