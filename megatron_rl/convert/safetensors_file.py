"""safetensors files read and written piece by piece.

Files are read with plain reads into the tensor that is asked for, never mapped into memory: mapped
pages count as a process's memory, and page faults are slow on network file systems.

Format: eight bytes with the header's length (little endian), the header as JSON
(name → dtype, shape, [start, stop) in the data), then the data without gaps.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_rl.convert.model_folder import TensorInfo

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100 * 2**20
_BLOCK_BYTES = 16 * 2**20


class FileSlice:
    """One tensor in a file; indexing reads only the rows (or, in blocks of rows, the columns)."""

    def __init__(self, path: Path, start: int, info: TensorInfo) -> None:
        self.path, self.start, self.info = path, start, info

    def get_shape(self) -> list[int]:
        return list(self.info.shape)

    def __getitem__(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if not self.info.shape:
            return self._rows(0, 1).view(())
        if not isinstance(index[0], slice):
            return self[(slice(index[0], index[0] + 1), *index[1:])][0]
        first, stop, step = index[0].indices(self.info.shape[0])
        assert step == 1, "slices of files have step 1"
        stop = max(first, stop)
        rest = (slice(None), *index[1:])
        if len(rest) == 1:
            return self._rows(first, stop)
        row = torch.empty(self.info.shape[1:], dtype=self.info.dtype, device="meta")
        out = torch.empty((stop - first, *row[index[1:]].shape), dtype=self.info.dtype)
        height = max(1, _BLOCK_BYTES // max(1, row.nbytes))
        for top in range(first, stop, height):
            bottom = min(top + height, stop)
            out[top - first : bottom - first] = self._rows(top, bottom)[rest]
        return out

    def _rows(self, first: int, stop: int) -> Tensor:
        shape = (stop - first, *self.info.shape[1:])
        out = torch.empty(shape, dtype=self.info.dtype)
        row_bytes = prod(self.info.shape[1:]) * self.info.dtype.itemsize
        buffer = memoryview(out.view(-1).view(torch.uint8).numpy()) if out.numel() else b""
        with self.path.open("rb", buffering=0) as stream:
            stream.seek(self.start + first * row_bytes)
            done = 0
            while done < len(buffer):
                count = stream.readinto(buffer[done:])
                if not count:
                    raise ValueError(f"{self.path} ended while it was read: it is being changed")
                done += count
        return out


class SafetensorsFile:
    """The tensors of one file by name; only the header is read.

    Raises:
        ValueError: if the file is not safetensors, cut short or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, data_start, data_bytes = self._header()
        header.pop("__metadata__", None)
        self.slices: dict[str, FileSlice] = {}
        end = 0
        for name, record in header.items():
            info, first, last = self._entry(name, record)
            end = max(end, last)
            self.slices[name] = FileSlice(path, data_start + first, info)
        if end != data_bytes:
            state = "it is cut short" if end > data_bytes else "it has bytes of no tensor"
            raise self._damaged(f"its header describes {end} bytes of data, it has {data_bytes}: "
                                f"{state}")  # fmt: skip

    def _header(self) -> tuple[dict[str, Any], int, int]:
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if size < 8 or length > min(_MAX_HEADER, size - 8):
                    raise self._damaged("it is cut short or no safetensors file")
                header = json.loads(stream.read(length))
        except OSError as error:
            raise ValueError(f"{self.path} can't be read ({error.strerror})") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise self._damaged("its header is not JSON") from error
        if not isinstance(header, dict):
            raise self._damaged("its header is not a table of tensors")
        return header, 8 + length, size - 8 - length

    def _entry(self, name: str, record: Any) -> tuple[TensorInfo, int, int]:
        try:
            dtype, shape = record["dtype"], tuple(int(n) for n in record["shape"])
            first, last = (int(n) for n in record["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its entry of {name!r} is not understood") from error
        if dtype not in _DTYPES:
            raise ValueError(
                f"{self.path}: {name} has dtype {dtype}, which is not supported (quantised "
                "weights? convert them to bf16 with the tool that made them)"
            )
        info = TensorInfo(shape=shape, dtype=_DTYPES[dtype])
        if min(shape, default=0) < 0 or first < 0 or last - first != info.nbytes:
            raise self._damaged(f"its entry of {name!r} does not fit its shape {shape}")
        return info, first, last

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} can't be used: {reason}; fetch or write it again")


class SafetensorsWriter:
    """Writes one file tensor by tensor, in the order of `entries`; memory holds one at a time."""

    def __init__(self, path: Path, entries: dict[str, TensorInfo]) -> None:
        self._open_entries = list(entries.items())[::-1]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, info in entries.items():
            header[name] = {
                "dtype": _NAMES[info.dtype], "shape": list(info.shape),
                "data_offsets": [end, end + info.nbytes],
            }  # fmt: skip
            end += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned
        self._stream: BinaryIO = path.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor; converted to the dtype that was announced."""
        expected, info = self._open_entries.pop()
        assert (name, tuple(tensor.shape)) == (expected, info.shape), (name, expected, info)
        data = tensor.detach().to("cpu", info.dtype).contiguous().view(-1)
        self._stream.write(memoryview(data.view(torch.uint8).numpy()))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        with self._stream:
            if kind is None:
                assert not self._open_entries, "tensors were announced and not written"
                self._stream.flush()
                os.fsync(self._stream.fileno())
