"""Pure layer: the int8 kernels against their definition, bit for bit, on fresh inputs.

Suffixes: R rows, C columns, K blocks of a row, N ranks.
"""

from functools import partial

import pytest
import torch

from megatron_rl.kernels import int8_allreduce as int8
from megatron_rl.kernels.int8_allreduce.kernel import Schedule
from megatron_rl.kernels.int8_allreduce.sweep import schedules, wrong_schedules

DTYPES = [torch.float32, torch.bfloat16]
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
OTHER_FORMS = "triton, other forms"
BACKENDS = ["cpp", "triton", OTHER_FORMS, "torch", pytest.param("cuda", marks=NEEDS_GPU)]


def backend_on(name: str) -> tuple[int8.Backend, str]:
    device = "cuda" if torch.cuda.is_available() and name != "cpp" else "cpu"
    backend = int8.select_backend(device, name.partition(",")[0])
    if name == OTHER_FORMS:
        form = Schedule(
            tile_values=1024, shared_reciprocal=True, bytes_as_floats=True, streaming=True
        )
        backend = int8.Backend(name, *(partial(f, schedule=form) for f in backend[1:]))
    return backend, device


def adversarial(rows: int, columns: int) -> torch.Tensor:
    """Values of every magnitude: outliers, denormals, zero blocks, ties, the largest floats."""
    x = torch.randn(rows, columns) * torch.logspace(-44, 35, columns).roll(torch.randint(99, ()))
    kind = torch.randint(0, 8, (rows, columns))
    x = torch.where(kind == 0, 0.0, x)
    x = torch.where(kind == 1, torch.randint(-254, 255, (rows, columns)) / 2.0, x)
    x[:, columns // 3 : columns // 2] = 0
    ties = x[:, columns // 2 : columns * 3 // 4]
    # Of a scale with all its digits: quotients next to ties, where a wrong last bit shows.
    ties.copy_(torch.randint(-254, 255, ties.shape) / 2.0 * (0.5 + torch.rand(())))
    x[0, -1] = torch.finfo(torch.float32).max
    return x


def poisoned(rows: int, columns: int, block: int, device: str) -> torch.Tensor:
    """A message full of rubbish, so that anything left unwritten shows."""
    size = int8.message_bytes(columns, block)
    return torch.randint(0, 256, (rows, size), dtype=torch.uint8, device=device)


def quantized(backend, x, block, residual, seed, device):
    """Bytes of the int8 values and scales, and the residual afterwards, on the CPU."""
    message = poisoned(x.shape[0], x.shape[1], block, device)
    q, scale = int8.message_views(message, x.shape[1], block)
    residual = None if residual is None else residual.clone().to(device)
    shifted = torch.empty(x.shape[0], x.shape[1] + 1, dtype=x.dtype, device=device)[:, 1:]
    shifted.copy_(x)  # a start that is not aligned
    backend.quantize(shifted, q, scale, block, residual, seed)
    return q.cpu(), scale.cpu().clone(), None if residual is None else residual.cpu()


def assert_same_bits(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        if other is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def test_golden_block():
    x_RC = torch.tensor([[0.1, -1.27, 0.635, 1.0]])
    q_RC, scale_RK = torch.empty(1, 4, dtype=torch.int8), torch.empty(1, 1)
    int8.reference.quantize(x_RC, q_RC, scale_RK, 128)
    assert q_RC.tolist() == [[10, -127, 64, 100]]
    assert scale_RK.item() == pytest.approx(0.01)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block", int8.BLOCK_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", [None, *DTYPES])
@pytest.mark.parametrize("seed", [None, 0xFEDCBA98])
def test_quantize_equals_reference(name, block, dtype, residual_dtype, seed):
    backend, device = backend_on(name)
    columns = 4 * block + int(torch.randint(1, 3 * block, ()))
    x_RC = adversarial(3, columns).to(dtype)
    residual = None if residual_dtype is None else torch.randn(3, columns).to(residual_dtype)
    theirs = quantized(int8.select_backend("cpu", "torch"), x_RC, block, residual, seed, "cpu")
    assert_same_bits(quantized(backend, x_RC, block, residual, seed, device), theirs)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 8, 17])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [None, 12345])
def test_reduce_and_dequantize_equal_reference(name, ranks, dtype, seed):
    backend, device = backend_on(name)
    block, columns = 256, 1000 + int(torch.randint(1, 300, ()))
    message = poisoned(ranks, columns, block, "cpu")
    q_NC, scale_NK = int8.message_views(message, columns, block)
    int8.reference.quantize(torch.randn(ranks, columns) * 100, q_NC, scale_NK, block)
    residual = torch.randn(columns)
    results = []
    for functions, where in ((backend, device), (int8.select_backend("cpu", "torch"), "cpu")):
        q, scale = int8.message_views(message.to(where), columns, block)
        out_q, out_scale = int8.message_views(poisoned(1, columns, block, where), columns, block)
        out, kept = torch.full((columns,), 7.0, dtype=dtype).to(where), residual.clone().to(where)
        functions.reduce(q, scale, block, out_C=out, factor=1 / 3)
        functions.reduce(
            q, scale, block, q_C=out_q[0], scale_K=out_scale[0], residual_C=kept, seed=seed
        )
        back = torch.empty(ranks, columns, dtype=dtype, device=where)
        functions.dequantize(q, scale, block, back)
        results.append([t.cpu() for t in (out, out_q, out_scale, kept, back)])
    assert_same_bits(*results)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_is_never_laundered(name, bad):
    backend, device = backend_on(name)
    x = torch.randn(1, 600)
    x[0, 300] = bad
    residual = torch.randn(1, 600)
    q, scale, kept = quantized(backend, x, 256, residual, None, device)
    out = torch.empty(1, 600)
    int8.reference.dequantize(q, scale, 256, out)
    assert out[0, 256:512].isnan().all()
    assert out[0, :256].isfinite().all() and out[0, 512:].isfinite().all()
    assert torch.equal(kept[0, 256:512], residual[0, 256:512])


@pytest.mark.parametrize("block", int8.BLOCK_SIZES)
def test_error_is_half_a_step(block):
    x = adversarial(2, 8 * block)
    q, scale, _ = quantized(int8.select_backend("cpu", "torch"), x, block, None, None, "cpu")
    out = torch.empty_like(x)
    int8.reference.dequantize(q, scale, block, out)
    top = x.double().abs().unflatten(1, (-1, block)).amax(2).repeat_interleave(block, 1)
    assert ((out.double() - x.double()).abs() <= top / 254 * (1 + 2e-5) + 1e-43).all()
    assert q.abs().max() <= 127


def test_residual_carries_what_was_lost():
    x, old = torch.randn(2, 512), torch.randn(2, 512) / 50
    q, scale, kept = quantized(int8.select_backend("cpu"), x, 256, old, None, "cpu")
    out = torch.empty_like(x)
    int8.reference.dequantize(q, scale, 256, out)
    torch.testing.assert_close(out + kept, x + old)


def test_stochastic_rounding_is_unbiased_and_bounded():
    x = torch.rand(1, 256).repeat(1, 400)
    mean = torch.zeros(256)
    for seed in range(8):
        q, scale, _ = quantized(int8.select_backend("cpu"), x, 256, None, seed * 977 + 1, "cpu")
        out = torch.empty_like(x)
        int8.reference.dequantize(q, scale, 256, out)
        assert ((out - x).abs() <= scale.max() * (1 + 1e-5)).all()
        mean += out.view(400, 256).mean(0) / 8
    # 3200 draws of a step uniform in [0, 1): the standard error is below step / 113.
    assert ((mean - x[0, :256]).abs() < scale.max() / 113 * 5).all()


@pytest.mark.parametrize("block", int8.BLOCK_SIZES)
def test_message_costs_one_byte_and_a_share_of_a_scale(block):
    assert int8.message_bytes(block * 64, block) == block * 64 + 4 * 64
    for columns in (1, 17, block, 5 * block + 3):
        size = int8.message_bytes(columns, block)
        assert 0 <= size - columns - 4 * int8.num_blocks(columns, block) < 32
        assert size % 16 == 0


def test_bad_choices_are_refused():
    with pytest.raises(ValueError, match="block_size is 100"):
        int8.check_block_size(100)
    with pytest.raises(ValueError, match="choose one of cuda, triton"):
        int8.select_backend("cpu", "fast")


def test_every_schedule_has_the_same_bits():
    def all_on_a_gpu(*, with_conversion: bool) -> list[Schedule]:
        found = list(schedules(with_conversion=with_conversion))
        if torch.cuda.is_available():
            return found
        return [s for s in found if (s.tile_values, s.warps) == (4096, 8) and not s.streaming]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert not wrong_schedules(device, all_on_a_gpu)
