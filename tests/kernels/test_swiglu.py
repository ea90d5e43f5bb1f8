"""SwiGLU against fp64 and against the two operations of a trained layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.kernels.swiglu import swiglu

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 2, 334), (3, 4098)], ids=str)
def test_equals_fp64(device, backend, dtype, shape):
    torch.manual_seed(shape[-1])
    gate_up = (3 * torch.randn(shape)).to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    y = swiglu(gate_up, backend=backend)
    assert y.dtype == dtype and y.shape == expected.shape
    assert (y.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]


def test_rounds_as_the_two_operations_do(device, backend):
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(4, 512)).to(device, torch.float16)
    gate, up = gate_up.chunk(2, dim=-1)
    same = swiglu(gate_up, backend=backend) == F.silu(gate) * up
    assert same.float().mean() > 0.99


def test_strided_large_and_empty(device, backend):
    gate_up = torch.randn(6, 4, 32, device=device)
    turned = swiglu(gate_up.transpose(0, 1), backend=backend)
    assert torch.equal(turned, swiglu(gate_up, backend=backend).transpose(0, 1))
    large = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=device)
    assert swiglu(large, backend=backend).tolist() == [[0.0, 3e4]]
    assert swiglu(gate_up[:0], backend=backend).shape == (0, 4, 16)


def test_training_gets_its_gradient(device, backend):
    gate_up = torch.randn(3, 16, device=device, requires_grad=True)
    swiglu(gate_up, backend=backend).sum().backward()
    wide = gate_up.detach().double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    (gate * torch.sigmoid(gate) * up).sum().backward()
    torch.testing.assert_close(gate_up.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="got width 7"):
        swiglu(torch.zeros(2, 7))
