"""Layer: pure. Our reader and writer of safetensors agree with the library's, slice by slice."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.convert import safetensors_file
from megatron_rl.convert.model_folder import TensorInfo
from megatron_rl.convert.safetensors_file import SafetensorsFile, SafetensorsWriter

INDICES = [
    (slice(None),), (slice(2, 5),), (slice(0, 0),), (slice(None), slice(1, 4)),
    (slice(3, 7), slice(2, None)), (slice(5, 99),), (3,), (slice(2, 4), 1),
]  # fmt: skip


def random_tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(7, 5), "b": torch.randn(9, 6).bfloat16(), "c": torch.randn(7, 4, 3).half(),
        "d": torch.randint(0, 2**40, (7, 5)), "e": torch.randn(11), "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }  # fmt: skip


def test_the_librarys_files_are_read_slice_by_slice(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "_BLOCK_BYTES", 50)  # two rows at a time
    tensors = random_tensors()
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.slices.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = file.slices[name]
        assert found.get_shape() == list(tensor.shape) and found.info.dtype == tensor.dtype
        for index in INDICES if tensor.dim() > 1 and len(tensor) else INDICES[:1]:
            got = found[index if len(index) > 1 else index[0]]
            assert torch.equal(got, tensor[index] if tensor.dim() else tensor), (name, index)


def test_the_library_reads_what_is_written(tmp_path):
    tensors = random_tensors()
    infos = {k: TensorInfo(shape=tuple(v.shape), dtype=v.dtype) for k, v in tensors.items()}
    infos["b"] = TensorInfo(shape=(9, 6), dtype=torch.float32)
    path = tmp_path / "y.safetensors"
    with SafetensorsWriter(path, infos) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor.t().contiguous().t() if tensor.dim() == 2 else tensor)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(infos[name].dtype)), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_out_of_order_or_left_out_are_our_own_mistakes(tmp_path):
    infos = {name: TensorInfo(shape=(2,), dtype=torch.float32) for name in "ab"}
    with pytest.raises(AssertionError), SafetensorsWriter(tmp_path / "z", infos) as writer:
        writer.add("b", torch.zeros(2))
    with pytest.raises(AssertionError, match="not written"):
        with SafetensorsWriter(tmp_path / "z", infos) as writer:
            writer.add("a", torch.zeros(2))


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
DAMAGED = {
    "cut short": (HEADER, b"\0" * 7, "cut short"),
    "too long": (HEADER, b"\0" * 9, "bytes of no tensor"),
    "shape": (HEADER.replace(b"[2]", b"[3]"), b"\0" * 8, "does not fit its shape"),
    "dtype": (HEADER.replace(b"F32", b"F8_E4M3"), b"\0" * 8, "dtype F8_E4M3"),
    "entry": (HEADER.replace(b"shape", b"sharp"), b"\0" * 8, "not understood"),
    "negative": (HEADER.replace(b"[0,8]", b"[-8,0]"), b"", "does not fit"),
    "no JSON": (b"{" * 40, b"", "not JSON"),
    "list": (b"[]", b"", "not a table"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_by_name(tmp_path, case):
    header, data, message = DAMAGED[case]
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(ValueError, match=message) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\1\0", b"\xff" * 8, b"\xff" * 200])
def test_files_of_another_kind_are_refused(tmp_path, content):
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cut short or no safetensors"):
        SafetensorsFile(path)
