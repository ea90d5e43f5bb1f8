"""The linear layer of a few rows, with norm, bias and SwiGLU, against fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.kernels.thin_linear import MAX_ROWS, Norm, thin_linear

# Three roundings in a row; Triton's interpreter cuts bf16 off instead of rounding.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 4e-2}


def expected(x, weight, bias, norm, gated):
    x, weight = x.double(), weight.double()
    stream = x
    if norm is not None:
        stream = x = x + (0 if norm.residual_BK is None else norm.residual_BK.double())
        x = norm.weight_K.double() * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    y = x @ weight.t() + (0 if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y, stream


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "normed", "added", "biased", "gated"),
    [
        (1, 64, 48, False, False, False, False),
        (4, 200, 10, True, False, True, False),
        (3, 576, 34, True, True, False, True),
        (2, 4160, 6, True, True, True, True),
    ],
)
def test_equals_fp64(device, backend, dtype, rows, inputs, outputs, normed, added, biased, gated):
    torch.manual_seed(inputs + outputs)
    x, residual = (torch.randn(rows, inputs).to(device, dtype) for _ in range(2))
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype) if biased else None
    norm_weight = (1 + 0.1 * torch.randn(inputs)).to(device, dtype)
    norm = Norm(weight_K=norm_weight, eps=1e-3, residual_BK=residual if added else None)
    norm = norm if normed else None
    y, stream = thin_linear(x, weight, bias, norm=norm, gated=gated, backend=backend)
    want, want_stream = expected(x, weight, bias, norm, gated)
    assert y.dtype == dtype and y.shape == want.shape
    assert (y.double() - want).norm() / want.norm() < TOLERANCE[dtype]
    assert (stream.double() - want_stream).norm() / want_stream.norm() < TOLERANCE[dtype]
    if not added:
        assert stream is x


def test_a_slice_of_a_weight(device, backend):
    """Dense rows of a wider matrix, and an input that is not contiguous."""
    torch.manual_seed(1)
    wide, x = torch.randn(12, 80, device=device), torch.randn(64, 2, device=device).t()
    y, _ = thin_linear(x, wide[:, :64], backend=backend)
    torch.testing.assert_close(y, x @ wide[:, :64].t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "weight", "kwargs", "message"),
    [
        ((2, 8), (4, 9), {}, r"got \(2, 8\) and \(4, 9\)"),
        ((MAX_ROWS + 1, 8), (4, 8), {}, "is too large: at most 4 rows"),
        ((2, 8), (5, 8), dict(gated=True), "got 5 weight rows"),
        ((2, 8), (4, 8), dict(bias_N=torch.zeros(3)), "does not fit 4 weight rows"),
        ((2, 8), (4, 8), dict(norm=Norm(weight_K=torch.ones(4), eps=0)), "does not fit 8"),
        (
            (2, 8), (4, 8),
            dict(norm=Norm(weight_K=torch.ones(8), eps=0, residual_BK=torch.zeros(1, 8))),
            "is not x's",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_named(x, weight, kwargs, message):
    with pytest.raises(ValueError, match=message):
        thin_linear(torch.zeros(x), torch.zeros(weight), **kwargs)


def test_weights_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="must have x's dtype"):
        thin_linear(torch.zeros(1, 8), torch.zeros(4, 8, dtype=torch.bfloat16))
