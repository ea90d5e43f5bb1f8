"""One rank's own state in one safetensors file: tensors by name, everything else as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_TENSOR = "__tensor__"


def rank_file(folder: Path, rank: int) -> Path:
    """Name of a rank's file in a checkpoint folder."""
    return folder / "ranks" / f"rank_{rank:05d}.safetensors"


def snapshot(tree: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """A JSON copy of `tree` in which tensors are replaced by names, with copies in `tensors`.

    Raises:
        ValueError: for a value that is neither a tensor nor JSON, naming its place.
    """
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: path}
    if isinstance(tree, dict):
        wrong = [key for key in tree if not isinstance(key, str)]
        if wrong:
            raise ValueError(f"state {path or '(top)'} has the key {wrong[0]!r}: keys must be text")
        return {key: snapshot(value, tensors, f"{path}/{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value, tensors, f"{path}/{i}") for i, value in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise ValueError(
        f"state {path or '(top)'} is a {type(tree).__name__}: a checkpoint takes tensors, text, "
        "numbers, lists and dictionaries; convert it in state_dict()"
    )


def _restore(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if set(tree) == {_TENSOR}:
            return tensors[tree[_TENSOR]]
        return {key: _restore(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_restore(value, tensors) for value in tree]
    return tree


def write_rank_file(path: Path, tree: Any, tensors: dict[str, Tensor]) -> None:
    """Writes what `snapshot` made."""
    # safetensors refuses an empty name and an empty file, so that one byte always goes along.
    payload = {"": torch.zeros(1, dtype=torch.uint8), **tensors}
    save_file({f"state{k}": v for k, v in payload.items()}, path, {"tree": json.dumps(tree)})


def read_rank_file(path: Path) -> Any:
    """The state that `snapshot` saw, with tensors on the CPU."""
    with safe_open(str(path), framework="pt", device="cpu") as file:
        tree = json.loads(file.metadata()["tree"])
        tensors = {k.removeprefix("state"): file.get_tensor(k) for k in file.keys()}
    return _restore(tree, tensors)
