"""Residual-add RMSNorm against fp64 and against Hugging Face's Llama norm."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.kernels.rms_norm import rms_norm

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_case(device, dtype, shape, seed):
    torch.manual_seed(seed)
    x, residual = (torch.randn(shape).to(device, dtype) * 3 for _ in range(2))
    return x, residual, (1 + 0.1 * torch.randn(shape[-1])).to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 200), (2, 3, 576), (3, 2049)], ids=str)
@pytest.mark.parametrize("added", [False, True], ids=["plain", "residual"])
def test_equals_fp64(device, backend, dtype, shape, added):
    x, residual, weight = random_case(device, dtype, shape, seed=shape[-1])
    y, stream = rms_norm(x, weight, 1e-5, residual if added else None, backend=backend)
    total = x.double() + residual.double() if added else x.double()
    expected = weight.double() * total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert y.dtype == dtype and y.shape == x.shape
    assert (y.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    assert (stream.double() - total).norm() / total.norm() < TOLERANCE[dtype]
    if not added:
        assert stream is x


def test_equals_hugging_face_llama_norm(device, backend):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, residual, weight = random_case(device, torch.float32, (5, 96), seed=1)
    norm = llama.LlamaRMSNorm(96, eps=1e-6).to(device)
    norm.weight.data.copy_(weight)
    with torch.no_grad():
        y, _ = rms_norm(x, weight, 1e-6, residual, backend=backend)
        torch.testing.assert_close(y, norm(x + residual), rtol=1e-6, atol=1e-6)


def test_tiny_inputs_are_held_up_by_eps_and_zeros_stay_zero(device, backend):
    weight = torch.ones(32, device=device)
    tiny = torch.full((1, 32), 1e-6, device=device)
    y, _ = rms_norm(tiny, weight, 1e-5, backend=backend)
    torch.testing.assert_close(y, tiny / 1e-5**0.5, rtol=1e-4, atol=0)
    assert not rms_norm(torch.zeros_like(tiny), weight, 1e-5, backend=backend)[0].any()


def test_strided_rows_mixed_dtypes_and_no_rows(device, backend):
    x, residual, weight = random_case(device, torch.float32, (4, 6, 64), seed=2)
    x_t, residual_t = x.transpose(0, 1), residual.transpose(0, 1)
    y, stream = rms_norm(x_t, weight, 1e-5, residual_t, backend=backend)
    y_dense, stream_dense = rms_norm(x, weight, 1e-5, residual, backend=backend)
    assert torch.equal(y, y_dense.transpose(0, 1))
    assert torch.equal(stream, stream_dense.transpose(0, 1))
    y, _ = rms_norm(x.bfloat16(), weight, 1e-5, backend=backend)
    assert y.dtype == torch.float32
    assert rms_norm(x[:0], weight, 1e-5, backend=backend)[0].shape == (0, 6, 64)


def test_training_gets_its_gradient(device, backend):
    x, residual, weight = random_case(device, torch.float64, (3, 16), seed=3)
    inputs = [t.requires_grad_() for t in (x.float(), weight.float(), residual.float())]
    y, stream = rms_norm(inputs[0], inputs[1], 1e-5, inputs[2], backend=backend)
    (y.square().sum() + stream.sum()).backward()
    total = (x.detach() + residual).requires_grad_()
    wide = weight.detach().requires_grad_()
    norm = wide * total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    (norm.square().sum() + total.sum()).backward()
    for got, expected in zip(inputs, (total.grad, wide.grad, total.grad), strict=True):
        torch.testing.assert_close(got.grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "residual", "message"),
    [
        (torch.ones(8), None, "does not match hidden size 16"),
        (torch.ones(16), torch.zeros(2, 16, dtype=torch.float16), "is not x's"),
        (torch.ones(16), torch.zeros(3, 16), "is not x's"),
    ],
)
def test_bad_input_is_named(weight, residual, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.zeros(2, 16), weight, 1e-5, residual)
    with pytest.raises(ValueError, match="above 65536"):
        rms_norm(torch.zeros(1, 65537), torch.ones(65537), 1e-5)
