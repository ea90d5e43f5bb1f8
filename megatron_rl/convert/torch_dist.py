"""Folders in torch's distributed checkpoint format, read and written tensor by tensor.

`.metadata` is the index (names, shapes, and where each chunk of a tensor lies), `*.distcp` hold the
chunks as `torch.save` writes them. Nothing here communicates, and nothing of a file is executed.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
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
            windows = overlap(offset, out.shape, chunk.offsets, chunk.sizes)
            if windows is not None:
                part = out[windows[0]]
                part.copy_(self._chunk(name, chunk)[windows[1]])
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


Window = tuple[slice, ...]


def overlap(
    offset: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> tuple[Window, Window] | None:
    """Where two rectangles of one tensor meet, as a window of each; None where they don't.

    Args:
        offset, other: their first corners.
    """
    low = [max(a, b) for a, b in zip(offset, other, strict=True)]
    high = [
        min(a + n, b + m)
        for a, n, b, m in zip(offset, shape, other, other_shape, strict=True)
    ]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return tuple(
        tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
        for origin in (offset, other)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a chunk lies: in the tensor `key` of `shape`, from the corner `offset` on."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class TorchDistPlan:
    """Writes a folder in files of a bounded size; a plan for `staging.carry_out`.

    Args:
        tensors: what to write, by name.
        read: gives a tensor, in the shape and dtype of `tensors`.
        prefix: subfolder of the files, ending in "/", or empty.
        places: what each of `tensors` is a chunk of; None where each is whole.
        common: the table in `common.pt`.
        empty_items: byte items (Megatron-Core's sharded objects) that hold nothing.
    """

    def __init__(
        self, tensors: dict[str, TensorInfo], read: Callable[[str], Tensor], *, max_bytes: int,
        prefix: str = "", places: dict[str, Place] | None = None,
        common: dict[str, Any] | None = None, empty_items: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.tensors, self.read, self.prefix = tensors, read, prefix
        self.places = places or {
            name: Place(key=name, shape=info.shape, offset=(0,) * len(info.shape))
            for name, info in tensors.items()
        }
        self.common, self.empty_items = common or {}, empty_items
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
        target = folder / self.prefix
        storage = {}
        for file, found in records.items():
            for name, (start, length) in found.items():
                place = self.places[name]
                storage[MetadataIndex(place.key, torch.Size(place.offset))] = _StorageInfo(
                    file.removeprefix(self.prefix), start, length
                )
        described: dict[str, Any] = {
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=parts[0][1].dtype), chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(p.offset), sizes=torch.Size(i.shape))
                    for p, i in parts
                ], size=torch.Size(parts[0][0].shape),
            )
            for key, parts in self._by_key().items()
        }  # fmt: skip
        if self.empty_items:
            path = target / "__0_nothing.distcp"
            torch.save([None], path)  # Megatron-Core keeps a list per item
            for key in self.empty_items:
                described[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = _StorageInfo(path.name, 0, path.stat().st_size)
        index = Metadata(
            state_dict_metadata=described, storage_data=storage, storage_meta=StorageMeta()
        )
        with (target / INDEX).open("wb") as stream:
            pickle.dump(index, stream)
        save_megatron_core_files(target, self.common)

    def _by_key(self) -> dict[str, list[tuple[Place, TensorInfo]]]:
        """The chunks of each tensor in the index."""
        found: dict[str, list[tuple[Place, TensorInfo]]] = {}
        for name, place in self.places.items():
            found.setdefault(place.key, []).append((place, self.tensors[name]))
        return found


def save_megatron_core_files(folder: Path, common: dict[str, Any] | None = None) -> None:
    """`common.pt` and `metadata.json`, which Megatron-Core's own loader looks for."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    torch.save(common or {}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
