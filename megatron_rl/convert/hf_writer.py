"""Writes Hugging Face folders: which files, the configuration, and what travels with the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.convert.companions import copy_companions
from megatron_rl.convert.model_folder import ModelFolder, TensorInfo, head_of, stored_rules, whole
from megatron_rl.convert.safetensors_file import SafetensorsWriter
from megatron_rl.convert.staging import Advance, PlannedFile, fill_files
from megatron_rl.models.architecture import Architecture
from megatron_rl.models.families import FAMILIES, config_json


class ExportPlan:
    """A Hugging Face folder in safetensors files of a bounded size; see `staging.Plan`.

    Args:
        tensors: what to write by Hugging Face name.
        read: gives a tensor; asked for in the order of `tensors` where all have one dtype.
        role: critic and reward models become sequence classifiers with one label.
        companions: see `companion_files`; its config.json is the base of the new one.
        head_name: prefix of the value head's tensors.
    """

    def __init__(
        self, tensors: dict[str, TensorInfo], read: Callable[[str], Tensor], *,
        architecture: Architecture, role: str, companions: dict[str, Path], max_bytes: int,
        head_name: str = "score",
    ) -> None:  # fmt: skip
        self.tensors, self.read, self.role, self.head_name = tensors, read, role, head_name
        self.architecture, self.companions = architecture, companions
        sizes = {name: info.nbytes for name, info in tensors.items()}
        groups = fill_files(sizes, max_bytes)
        self._names = {
            _file_name(i, len(groups)): sorted(names, key=lambda n: -tensors[n].dtype.itemsize)
            for i, names in enumerate(groups)
        }
        self.files = [
            PlannedFile(name=file, nbytes=sum(sizes[n] for n in names))
            for file, names in self._names.items()
        ]

    def _stored(self, name: str) -> str:
        part = name.removeprefix("score.")
        return name if part == name else f"{self.head_name}.{part}"

    def write(self, file: PlannedFile, path: Path, advance: Advance) -> dict[str, Any]:
        """See `staging.Plan`; one tensor is in memory at a time."""
        names = self._names[file.name]
        with SafetensorsWriter(path, {self._stored(n): self.tensors[n] for n in names}) as writer:
            for name in names:
                writer.add(self._stored(name), self.read(name))
                advance(self.tensors[name].nbytes)
        return {}

    def finish(self, folder: Path, records: dict[str, dict[str, Any]]) -> None:
        """See `staging.Plan`."""
        copy_companions(self.companions, folder)
        (folder / "config.json").write_text(json.dumps(self._config(), indent=2) + "\n")
        if len(self.files) > 1:
            weight_map = {self._stored(n): f for f, names in self._names.items() for n in names}
            total = sum(info.nbytes for info in self.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _config(self) -> dict[str, Any]:
        sizes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += info.nbytes
        dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
        config = config_json(self.architecture, dtype=dtype)
        if "config.json" in self.companions:
            config = json.loads(self.companions["config.json"].read_text())
            config.pop("torch_dtype", None)
            config["dtype"] = dtype
        causal = FAMILIES[self.architecture.family]
        if head_of(self.role) == "lm":
            return config | {"architectures": [causal]}
        for field in ("num_labels", "id2label", "label2id"):
            config.pop(field, None)
        # A classifier of transformers has no bias, its token classifier has one.
        kind = "Token" if "score.bias" in self.tensors else "Sequence"
        return config | {
            "architectures": [causal.replace("ForCausalLM", f"For{kind}Classification")],
            "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
        }  # fmt: skip


def _file_name(index: int, count: int) -> str:
    part = "" if count == 1 else f"-{index + 1:05d}-of-{count:05d}"
    return f"model{part}.safetensors"


def export_plan(
    folder: ModelFolder, *, dtype: torch.dtype | None, max_bytes: int, head_name: str = "score"
) -> ExportPlan:
    """Plans the conversion of any model folder to a Hugging Face one.

    A value head's bias of zero is left out: transformers' classifiers have none.
    """
    infos = folder.tensors()
    rules = stored_rules(folder.architecture, folder.head)
    if "output_layer.bias" in infos and not bool(whole(folder, "output_layer.bias").any()):
        infos.pop("output_layer.bias")
    megatron_name = {hf: name for name in infos for hf in rules[name].hf}
    tensors = {
        hf: TensorInfo(shape=shape, dtype=dtype or infos[name].dtype)
        for name in infos
        for hf, shape in rules[name].shapes(folder.architecture).items()
    }
    merged: dict[str, dict[str, Tensor]] = {}

    def read(hf: str) -> Tensor:
        name = megatron_name[hf]
        if name not in merged:
            merged.clear()  # only the tensor at hand is kept
            merged[name] = rules[name].merge([whole(folder, name)], folder.architecture)
        return merged[name][hf]

    return ExportPlan(
        tensors, read, architecture=folder.architecture, role=folder.role,
        companions=folder.companions(), max_bytes=max_bytes, head_name=head_name,
    )  # fmt: skip
