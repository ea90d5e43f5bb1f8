"""The tensors of a Hugging Face folder by name, whatever files hold them.

`*.safetensors` are preferred; `pytorch_model*.bin` are read with torch's restricted unpickler.
Names are brought to the ones of transformers' classes: a value head under any of its common names
appears as `score.*`, and a trunk that was saved without the prefix `model.` gets it.
"""

from __future__ import annotations

import json
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_rl.checkpoint.safe_loading import safe_torch_load
from megatron_rl.convert.model_folder import TensorInfo
from megatron_rl.convert.names import Sliceable
from megatron_rl.convert.safetensors_file import SafetensorsFile

VALUE_HEADS = (
    "score", "v_head.summary", "v_head", "value_head.summary", "value_head", "reward_head",
    "rm_head", "regression_head", "classifier", "summary",
)  # fmt: skip
"""Names under which value heads are found (transformers, TRL, OpenRLHF and others)."""
_WRAPPERS = ("pretrained_model.", "module.", "base_model.")
_TRUNK = ("embed_tokens.", "layers.", "norm.")
_BESIDE = ("value_head.safetensors", "value_head.bin")
_LAYOUTS = (  # index file, files without an index in order of preference
    ("model.safetensors.index.json", ("model.safetensors", "model*.safetensors", "*.safetensors")),
    ("pytorch_model.bin.index.json", ("pytorch_model.bin", "pytorch_model*.bin")),
)  # fmt: skip


class _TorchSlice:
    """A tensor of a `.bin` file (mapped from the file where its format allows)."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.info = TensorInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)

    def get_shape(self) -> list[int]:
        return list(self.info.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


class _File(Protocol):
    slices: dict[str, Any]


class _TorchFile:
    def __init__(self, path: Path) -> None:
        try:
            # Files of before torch 1.6 are no zip archives and can't be mapped.
            state = safe_torch_load(path, mmap=zipfile.is_zipfile(path))
        except (OSError, RuntimeError, EOFError) as error:
            found = str(error).splitlines()[0]
            raise ValueError(f"{path} is cut short or damaged ({found}); fetch it again") from error
        if not isinstance(state, dict):
            raise ValueError(f"{path} holds a {type(state).__name__}, not a table of tensors")
        self.slices = {k: _TorchSlice(v) for k, v in state.items() if isinstance(v, Tensor)}


def _open(path: Path) -> _File:
    return SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


class HuggingFaceWeights:
    """The tensors of a model folder, read lazily by name.

    Raises:
        ValueError: for a folder without weights, an index naming a missing file, or a file that is
            cut short, damaged or holds code.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files = self._find_files()
        self._opened: dict[str, _File] = {}

    def _find_files(self) -> list[Path]:
        for index_name, patterns in _LAYOUTS:
            index = self.folder / index_name
            if index.is_file():
                found = [self.folder / name for name in _indexed_files(index)]
            else:
                found = next(
                    (files for p in patterns if (files := sorted(self.folder.glob(p)))), []
                )
            if found:
                beside = [self.folder / name for name in _BESIDE]
                return found + [p for p in beside if p.is_file() and p not in found]
        raise ValueError(
            f"no model.safetensors, model-*-of-*.safetensors or pytorch_model*.bin in "
            f"{str(self.folder)!r}: give the folder that transformers' save_pretrained writes"
        )

    @cached_property
    def _stored(self) -> dict[str, tuple[Path, str]]:
        """Canonical name → file and name inside it."""
        stored: dict[str, tuple[Path, str]] = {}
        for path in self.files:
            for name in self._file(path).slices:
                if name in stored:
                    raise ValueError(f"{path} and {stored[name][0]} both hold {name}")
                stored[name] = (path, name)
        names = _canonical(set(stored))
        return {canonical: stored[name] for name, canonical in names.items()}

    def _file(self, path: Path) -> _File:
        if path.name not in self._opened:
            self._opened[path.name] = _open(path)
        return self._opened[path.name]

    def names(self) -> set[str]:
        return set(self._stored)

    def stored_name(self, name: str) -> str:
        """The name that the file itself uses."""
        return self._stored[name][1]

    def __call__(self, name: str) -> Sliceable:
        """The tensor `name`, still in its file.

        Raises:
            ValueError: if no file holds it.
        """
        if name not in self._stored:
            raise ValueError(f"{str(self.folder)!r} has no tensor {name!r}, which the model needs")
        path, inside = self._stored[name]
        return self._file(path).slices[inside]

    def info(self, name: str) -> TensorInfo:
        return self(name).info


def _indexed_files(index: Path) -> list[str]:
    """The files that an index names.

    Raises:
        ValueError: if the index can't be read, or names a file that is missing or elsewhere.
    """
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = [name for name in files if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weights ({error!r})") from error
    if outside:
        raise ValueError(f"{index} names {outside[0]!r}, which is outside its folder")
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"{index} names files that are missing: {', '.join(missing)}; fetch them again"
        )
    return files


def _canonical(names: set[str]) -> dict[str, str]:
    """Stored name → the name in transformers' classes."""
    renamed = {}
    for name in names:
        wrapper = next((w for w in _WRAPPERS if name.startswith(w)), "")
        renamed[name] = name.removeprefix(wrapper)
    if not any(name.startswith("model.") for name in renamed.values()):
        renamed = {k: f"model.{v}" if v.startswith(_TRUNK) else v for k, v in renamed.items()}
    values = set(renamed.values())
    head = next((h for h in VALUE_HEADS if f"{h}.weight" in values), None)
    if head is not None:
        for part in ("weight", "bias"):
            for name in [k for k, v in renamed.items() if v == f"{head}.{part}"]:
                renamed[name] = f"score.{part}"
    if len(set(renamed.values())) < len(renamed):
        twice = sorted(v for v in values if list(renamed.values()).count(v) > 1)
        raise ValueError(f"the folder holds {twice[0]} under two names")
    return renamed
