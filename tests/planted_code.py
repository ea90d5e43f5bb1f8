"""Pickles that would run code, planted in model folders and checkpoints.

The package is imported inside functions: the fixtures of every test load this file.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

PLACES = (".metadata", "common.pt", "a byte item", "a tensor's bytes")


class Plant:
    """Creates `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def name_as_pickle(module: str, name: str) -> bytes:
    """A pickle of `module.name`. Names of protocol 4 may hold dots, which reach through modules."""

    def text(value: str) -> bytes:
        return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()

    return pickle.PROTO + b"\x04" + text(module) + text(name) + pickle.STACK_GLOBAL + b"."


def plant_in_checkpoint(folder: Path, place: str, marker: Path) -> None:
    """Plants in one of `PLACES` of a checkpoint, and makes its index and manifest fit."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    from megatron_rl.checkpoint.safe_loading import read_index

    tensors = folder / "tensors"
    index = read_index(tensors)
    if place == ".metadata":
        index.planner_data = Plant(marker)
        (tensors / place).write_bytes(pickle.dumps(index))
    elif place == "common.pt":
        torch.save(Plant(marker), tensors / place)
    else:
        key, info = next((k, v) for k, v in index.storage_data.items() if "layernorm" in k.fqn)
        with (tensors / info.relative_path).open("ab") as stream:
            info.offset = stream.tell()
            torch.save(Plant(marker), stream)
            info.length = stream.tell() - info.offset
        if place == "a byte item":
            index.state_dict_metadata[key.fqn] = BytesStorageMetadata()
        (tensors / ".metadata").write_bytes(pickle.dumps(index))
    renew_manifest(folder)


def renew_manifest(folder: Path) -> None:
    """Makes the manifest fit what the files hold now."""
    from megatron_rl.checkpoint.folder import Manifest, record_of

    manifest = Manifest.read(folder)
    for name in manifest.files:
        manifest.files[name] = record_of(folder / name)
    manifest.write(folder)
