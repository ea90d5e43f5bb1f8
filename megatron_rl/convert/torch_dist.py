"""Folders in torch's distributed checkpoint format, read and written tensor by tensor.

`.metadata` is the index (names, shapes, and where each chunk of a tensor lies), `*.distcp` hold the
chunks as `torch.save` writes them. Nothing here communicates, and nothing of a file is executed.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_rl.checkpoint.safe_loading import INDEX, SafeReader, safe_torch_load
from megatron_rl.convert.model_folder import TensorInfo
from megatron_rl.convert.staging import Advance, PlannedFile, fill_files


class TorchDistFolder:
    """The tensors of a folder by name; each read opens only the files that hold it.

    Raises:
        ValueError: if the index is missing or damaged; `UnsafeCheckpointError` if it holds code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = SafeReader(folder).read_metadata()
        self.tensors = {
            name: TensorInfo(shape=tuple(found.size), dtype=found.properties.dtype)
            for name, found in self.index.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    def files(self, names: Iterable[str]) -> list[Path]:
        """The files that hold the tensors `names`."""
        wanted = set(names)
        storage = self.index.storage_data or {}
        found = {place.relative_path for key, place in storage.items() if key.fqn in wanted}
        return [self.folder / name for name in sorted(found)]

    def read(self, name: str, out: Tensor, offset: tuple[int, ...] | None = None) -> None:
        """Fills `out` with the rectangle of its shape at `offset` of the tensor `name`.

        Raises:
            ValueError: if the tensor or a part of it is missing, or its file is damaged.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.folder} has no tensor {name}")
        offset = offset or (0,) * out.dim()
        covered = 0
        for chunk in self.index.state_dict_metadata[name].chunks:
            low = [max(a, b) for a, b in zip(offset, chunk.offsets, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(offset, out.shape, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part = out[_window(low, high, offset)]
            part.copy_(self._chunk(name, chunk)[_window(low, high, chunk.offsets)])
            covered += part.numel()
        if covered != out.numel():
            raise ValueError(f"{self.folder}: the chunks of {name} do not make up the whole tensor")

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        place = self.index.storage_data.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise ValueError(f"{self.folder / INDEX} does not say where {name} is")
        path = self.folder / place.relative_path
        try:
            with path.open("rb") as stream:
                view = _create_file_view(stream, place.offset, place.length)
                tensor = safe_torch_load(view, f"{name} in {path}")
        except (OSError, RuntimeError, EOFError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path} is damaged or cut short at {name} ({reason})") from error
        if not isinstance(tensor, Tensor) or tensor.shape != torch.Size(chunk.sizes):
            raise ValueError(f"{path} holds something else than {name} in its place")
        return tensor


def _window(low: list[int], high: list[int], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


class TorchDistPlan:
    """Writes a folder in files of a bounded size; a plan for `staging.carry_out`.

    Args:
        tensors: what to write, by name.
        read: gives a whole tensor, in the dtype of `tensors`.
        prefix: subfolder of the files, ending in "/", or empty.
    """

    def __init__(
        self, tensors: dict[str, TensorInfo], read: Callable[[str], Tensor], *, max_bytes: int,
        prefix: str = "",
    ) -> None:  # fmt: skip
        self.tensors, self.read, self.prefix = tensors, read, prefix
        sizes = {name: info.nbytes for name, info in tensors.items()}
        self._names = {
            f"{prefix}__0_{i}.distcp": names
            for i, names in enumerate(fill_files(sizes, max_bytes))
        }
        self.files = [
            PlannedFile(name=file, nbytes=sum(sizes[n] for n in names))
            for file, names in self._names.items()
        ]

    def write(self, file: PlannedFile, path: Path, advance: Advance) -> dict[str, Any]:
        """Writes one file; returns name → [offset, length] of its tensors."""
        places: dict[str, list[int]] = {}
        with path.open("wb") as stream:
            for name in self._names[file.name]:
                start = stream.tell()
                # A view would be saved with all of its storage.
                torch.save(self.read(name).contiguous().clone(), stream)
                places[name] = [start, stream.tell() - start]
                advance(self.tensors[name].nbytes)
            stream.flush()
            os.fsync(stream.fileno())
        return places

    def finish(self, folder: Path, records: dict[str, dict[str, Any]]) -> None:
        """Writes the index, and the files that Megatron-Core's own loader looks for."""
        storage = {}
        for file, places in records.items():
            for name, (start, length) in places.items():
                origin = torch.Size([0] * len(self.tensors[name].shape))
                storage[MetadataIndex(name, origin)] = _StorageInfo(
                    file.removeprefix(self.prefix), start, length
                )
        index = Metadata(
            state_dict_metadata={n: _described(info) for n, info in self.tensors.items()},
            storage_data=storage, storage_meta=StorageMeta(),
        )  # fmt: skip
        target = folder / self.prefix
        with (target / INDEX).open("wb") as stream:
            pickle.dump(index, stream)
        save_megatron_core_files(target)


def save_megatron_core_files(folder: Path) -> None:
    """`common.pt` and `metadata.json`, which Megatron-Core's own loader looks for."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    torch.save({}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def _described(info: TensorInfo) -> TensorStorageMetadata:
    origin = torch.Size([0] * len(info.shape))
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=info.dtype), size=torch.Size(info.shape),
        chunks=[ChunkStorageMetadata(offsets=origin, sizes=torch.Size(info.shape))],
    )  # fmt: skip
