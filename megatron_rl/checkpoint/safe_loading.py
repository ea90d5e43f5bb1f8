"""Reads Megatron's and torch's checkpoint files without ever running code from them.

torch's distributed checkpoint reads its index `.metadata` with plain `pickle.load` and byte items
with `weights_only=False`: a crafted file runs any code. Here the index goes through an unpickler
that knows the few classes an index is made of, and byte items and `common.pt` through torch's own
restricted one.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

INDEX = ".metadata"
_MODULE = "torch.distributed.checkpoint."
_CLASSES = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"),
    ("pathlib._local", "Path"), ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(
        (f"{_MODULE}metadata", name)
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_MODULE}filesystem", "_StorageInfo"),
}  # fmt: skip
_SAVE_PLANS = {
    # Megatron-Core keeps the ranks' plans in its index; nothing of them is needed for loading.
    "megatron.core.dist_checkpointing.strategies.torch",
    f"{_MODULE}planner",
    f"{_MODULE}filesystem",
}


class _Ignored:
    """Stands in for a class whose contents are not needed: takes any state, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class UnsafeCheckpointError(ValueError):
    """A checkpoint file names something that is not part of any checkpoint."""


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedIOBase, path: Path) -> None:
        super().__init__(stream)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in _SAVE_PLANS and "." not in name:
            return _Ignored
        raise UnsafeCheckpointError(
            f"{self.path} asks for {module}.{name}, which no checkpoint index contains: the file "
            "is damaged or was made to run code; don't use this checkpoint"
        )


def read_index(folder: Path) -> Metadata:
    """The index of a `torch_dist` folder: names, shapes and places of all tensors.

    Raises:
        UnsafeCheckpointError: if the file holds anything else.
        ValueError: if it is missing or damaged.
    """
    path = Path(folder) / INDEX
    try:
        with path.open("rb") as stream:
            index = _IndexUnpickler(stream, path).load()
    except UnsafeCheckpointError:
        raise
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: {folder} is not a torch_dist checkpoint or is incomplete"
        ) from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{path} can't be read ({type(error).__name__}: {error})") from error
    if not isinstance(index, Metadata):
        raise UnsafeCheckpointError(f"{path} holds a {type(index).__name__}, not an index")
    return index


class SafeReader(FileSystemReader):
    """torch's reader with the index read by `read_index` and files kept inside the folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path)
        index = read_index(folder)
        for info in (index.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise UnsafeCheckpointError(
                    f"{folder / INDEX} points to {info.relative_path!r} outside its folder"
                )
        if getattr(index, "storage_meta", None) is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner with byte items read by the restricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = safe_torch_load(
            value, f"byte item {read_item.dest_index.fqn}"
        )


def safe_torch_load(
    source: Path | IO[bytes], name: str | None = None, *, mmap: bool = False
) -> Any:
    """Reads a `torch.save` file with the restricted unpickler.

    Megatron-LM's `common.pt` keeps its command line as an `argparse.Namespace`, which is allowed:
    it is a plain record.

    Args:
        mmap: leave the tensors in the file (a path in torch's zip format) until they are used.

    Raises:
        UnsafeCheckpointError: if the file names any other class or function.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _unsafe(name or str(source), error) from error


def _unsafe(name: str, error: pickle.UnpicklingError) -> UnsafeCheckpointError:
    """Torch's refusal in one line: of its long advice only the offending name is of use."""
    found = re.search(r"Unsupported (?:global: GLOBAL|class|operand)\s+(\S+)", str(error))
    asks = f"it asks for {found[1]}" if found else "it holds something else"
    return UnsafeCheckpointError(
        f"{name} is not plain data ({asks}): it is damaged or was made to run code; don't use this "
        "checkpoint"
    )


def read_tensors(folder: Path, state: dict[str, Any]) -> None:
    """Fills `state` (name → tensor or sharded tensor) in place from a `torch_dist` folder.

    Purely local: every rank reads what it needs.

    Raises:
        ValueError: if a tensor is missing or has another shape, or a file is damaged.
    """
    reader = SafeReader(folder)
    planner = SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    index = reader.read_metadata()
    missing = sorted(set(state) - set(index.state_dict_metadata))
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors that this run needs, for example "
            f"{', '.join(missing[:5])}"
        )
    for name, target in state.items():
        stored = index.state_dict_metadata[name]
        if isinstance(stored, BytesStorageMetadata) and not isinstance(target, io.BytesIO):
            raise UnsafeCheckpointError(
                f"{folder / INDEX} says that {name} is no tensor but a byte item: it is damaged or "
                "was made to run code; don't use this checkpoint"
            )
    planner.set_up_planner(state, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    try:
        reader.read_data(plan, planner).wait()
    except pickle.UnpicklingError as error:
        raise _unsafe(f"a tensor in {folder}", error) from error
    except RuntimeError as error:  # torch's reader of its own file format
        raise ValueError(f"{folder} is damaged: {str(error).splitlines()[0]}") from error
