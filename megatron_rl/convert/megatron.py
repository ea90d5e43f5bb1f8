"""Megatron folders: a run's checkpoint, or a weights-only folder of the same make.

    manifest.json    what was written, with sizes and checksums
    state.json       roles: architecture, head and dtype of each model
    tensors/         torch_dist, whole tensors named {role}.{Megatron parameter}
    huggingface/     config.json, tokenizer, chat template, generation settings

A run's step folder holds more in each of these places (optimizers, schedules, random state), which
is not read here.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.contents import versions
from megatron_rl.checkpoint.cuts import cut_of, pieces
from megatron_rl.checkpoint.folder import (
    COMPANIONS,
    MANIFEST,
    STATE,
    TENSORS,
    FileRecord,
    Manifest,
    checkpoints,
    record_of,
    write_text,
)
from megatron_rl.convert.companions import companion_files, copy_companions
from megatron_rl.convert.model_folder import (
    OUTPUT_BIAS,
    OUTPUT_WEIGHT,
    ModelFolder,
    TensorInfo,
    head_of,
    listing,
    stored_rules,
    whole,
)
from megatron_rl.convert.names import at_ep
from megatron_rl.convert.staging import Advance, PlannedFile
from megatron_rl.convert.torch_dist import TorchDistFolder, TorchDistPlan
from megatron_rl.models.architecture import Architecture, Experts, Rope

_MAIN = "optimizer.main_param"


def find_step(path: str | Path) -> Path | None:
    """The folder with the manifest: `path` itself, or the newest checkpoint of a run's folder."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    for root in (path, path / "checkpoints"):
        found = [step for step, serial in checkpoints(root) if serial is not None]
        if found:
            return found[0]
    return None


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        state = json.loads(path.read_text())
        if not isinstance(state["roles"], dict):
            raise TypeError("roles is no table")
        return state
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({error}): the folder is incomplete") from error


def stored_roles(path: Path) -> dict[str, str]:
    """Role → head of the models that a folder holds."""
    step = find_step(path)
    return {role: r["head"] for role, r in _read_state(step)["roles"].items()} if step else {}


class MegatronFolder:
    """One model of a Megatron folder; see `ModelFolder`.

    Args:
        role: what the model is for. A reference reads the actor; a critic reads the actor, with a
            fresh head, where there is no critic.
        full_precision: read the optimizer's fp32 copies of 16-bit weights where there are any.

    Raises:
        ValueError: if the folder is none of this kind or lacks the role.
    """

    kind = "megatron"
    note = ""

    def __init__(self, path: str | Path, role: str, *, full_precision: bool = False) -> None:
        step = find_step(path)
        if step is None:
            raise ValueError(
                f"{str(path)!r} holds no checkpoint: name a weights folder, a step_… folder, or "
                "the folder that holds those"
            )
        self.path, self.role, self.head = step, role, head_of(role)
        self.manifest = Manifest.read(step)
        self._state = _read_state(step)
        self.companion_folder = _companion_folder(step, self._state)
        self.stored_role = self._choose(role, self.head)
        record = self._state["roles"][self.stored_role]
        self.architecture = _architecture(record["architecture"], step)
        self.fresh_head = self.head != record["head"]
        self._tensors = TorchDistFolder(step / TENSORS)
        self._rules = stored_rules(self.architecture, self.head)
        if self.fresh_head:
            for name in (OUTPUT_WEIGHT, OUTPUT_BIAS):
                self._rules.pop(name)
        elif self.head == "value" and self._plain_key(OUTPUT_BIAS) not in self._tensors.tensors:
            self._rules.pop(OUTPUT_BIAS)
        self._full_precision = full_precision

    def _choose(self, role: str, head: str) -> str:
        heads = {name: record["head"] for name, record in self._state["roles"].items()}
        wanted = [role, {"reference": "actor"}.get(role)]
        same_head = [name for name, stored in heads.items() if stored == head]
        wanted += same_head if len(heads) == 1 else []
        wanted += ["actor"] if role == "critic" else []
        for name in wanted:
            if name in heads and (heads[name] == head or role == "critic"):
                return name
        held = ", ".join(f"{name} ({h} head)" for name, h in heads.items()) or "nothing"
        raise ValueError(f"{str(self.path)!r} has no {role}: it holds {held}")

    def _plain_key(self, name: str) -> str:
        return f"{self.stored_role}.{name}"

    def _key(self, name: str) -> str:
        main = f"{self.stored_role}.{_MAIN}.{name}"
        use_main = self._full_precision and main in self._tensors.tensors
        return main if use_main else self._plain_key(name)

    def check(self) -> None:
        """See `ModelFolder`; checksums are compared by `verify` and on resume."""
        damaged = [
            f"{name} ({'missing' if size is None else f'{size} bytes instead of {record.size}'})"
            for name, record in self.manifest.files.items()
            if (size := _size(self.path / name)) != record.size
        ]
        if damaged:
            raise ValueError(f"{self.path} is damaged: {listing(damaged)}; use another checkpoint")
        found = self._tensors.tensors
        prefix = f"{self.stored_role}."
        keys = {self._plain_key(name) for name in self._rules}
        names = {n for n in found if n.startswith(prefix) and not n.startswith(f"{prefix}optim")}
        if self.fresh_head:
            names.discard(self._plain_key(OUTPUT_WEIGHT))  # the actor's vocabulary
        if keys != names:
            raise ValueError(
                f"{self.path / TENSORS} does not hold a {self.architecture.family} {self.role}: "
                f"missing {listing(keys - names)}; unexpected {listing(names - keys)}"
            )
        for name, rule in self._rules.items():
            shapes = rule.shapes(self.architecture).values()
            count = sum(TensorInfo(shape=s, dtype=torch.uint8).nbytes for s in shapes)
            stored = found[self._plain_key(name)].shape
            if TensorInfo(shape=stored, dtype=torch.uint8).nbytes != count:
                raise ValueError(
                    f"{self._plain_key(name)} in {self.path} has shape {stored}, its architecture "
                    f"asks for {' and '.join(map(str, shapes))} together"
                )

    def tensors(self) -> dict[str, TensorInfo]:
        """See `ModelFolder`."""
        return {name: self._tensors.tensors[self._key(name)] for name in self._rules}

    def read_into(
        self, name: str, out: Tensor, *, tp: int = 1, rank: int = 0, ep: int = 1
    ) -> None:
        """See `ModelFolder`; opens only the files that hold the part."""
        rule = at_ep(self._rules[name], ep)
        cut = cut_of(rule, self.architecture, tuple(out.shape), tp=tp, rank=rank)
        if cut.padded:
            out.zero_()
        for piece in pieces(cut, out.view(-1), 0):
            self._tensors.read(self._key(name), piece.data, piece.offset)

    def source_files(self) -> list[Path]:
        """See `ModelFolder`."""
        files = self._tensors.files(self._key(name) for name in self._rules)
        return [self.path / MANIFEST, self.path / STATE, *files]

    def companions(self) -> dict[str, Path]:
        """See `ModelFolder`."""
        return companion_files(self.companion_folder)

    def layout(self) -> dict[str, int]:
        """See `ModelFolder`."""
        sizes = self.manifest.layouts.get("run", {})
        return {axis: sizes[axis] for axis in ("tp", "pp", "vpp") if sizes.get(axis, 1) > 1}

    def details(self) -> dict[str, str]:
        """See `ModelFolder`."""
        layouts = {
            role: " ".join(f"{k}={v}" for k, v in sizes.items())
            for role, sizes in self.manifest.layouts.items()
        }
        return {
            "step": str(self.manifest.step) if "states" in self._state else "weights only",
            "stored as": self.stored_role,
            **{f"layout of {role}": text for role, text in layouts.items()},
            "written by": ", ".join(f"{k} {v}" for k, v in self.manifest.versions.items()),
        }


def _companion_folder(step: Path, state: dict[str, Any]) -> Path:
    """The step's own copy, or where the run that saved it read its actor from."""
    model = (state.get("config") or {}).get("model") or {}
    source = (model.get("actor") or {}).get("path")
    own = step / COMPANIONS
    return Path(source) if not own.is_dir() and source and Path(source).is_dir() else own


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _architecture(record: dict[str, Any], folder: Path) -> Architecture:
    try:
        experts = record.get("experts")
        parts = {"rope": Rope(**record["rope"]), "experts": experts and Experts(**experts)}
        return Architecture(**(record | parts))
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{folder / STATE} describes an architecture that this version does not know "
            f"({error}): use the version that wrote it"
        ) from error


class MegatronPlan:
    """A weights-only folder; see `staging.Plan`."""

    def __init__(
        self, source: ModelFolder, *, dtype: torch.dtype | None, max_bytes: int
    ) -> None:
        self.source = source
        infos = {
            name: TensorInfo(shape=info.shape, dtype=dtype or info.dtype)
            for name, info in source.tensors().items()
        }
        if source.fresh_head:
            shape = (1, source.architecture.hidden)
            infos[OUTPUT_WEIGHT] = TensorInfo(shape=shape, dtype=torch.float32)
        prefix = f"{source.role}."
        self._tensors = TorchDistPlan(
            {prefix + name: info for name, info in infos.items()},
            lambda key: self._read(key.removeprefix(prefix), infos), max_bytes=max_bytes,
            prefix=f"{TENSORS}/",
        )  # fmt: skip
        self.files = self._tensors.files

    def _read(self, name: str, infos: dict[str, TensorInfo]) -> Tensor:
        if self.source.fresh_head and name == OUTPUT_WEIGHT:
            return torch.zeros(infos[name].shape)
        return whole(self.source, name, infos[name].dtype)

    def write(self, file: PlannedFile, path: Path, advance: Advance) -> dict[str, Any]:
        """See `staging.Plan`."""
        places = self._tensors.write(file, path, advance)
        return {"places": places, "file": asdict(record_of(path))}

    def finish(self, folder: Path, records: dict[str, dict[str, Any]]) -> None:
        """See `staging.Plan`."""
        self._tensors.finish(folder, {name: record["places"] for name, record in records.items()})
        sizes: dict[torch.dtype, int] = {}
        for info in self._tensors.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        role = {
            "architecture": asdict(self.source.architecture), "head": self.source.head,
            "dtype": str(max(sizes, key=sizes.get)).removeprefix("torch."),
        }  # fmt: skip
        write_text(folder / STATE, json.dumps({"roles": {self.source.role: role}}, indent=1) + "\n")
        copy_companions(self.source.companions(), folder / COMPANIONS)
        written = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.parent.name[0] != "."]
        files = {
            name: FileRecord(**records[name]["file"]) if name in records else record_of(path)
            for path in written
            for name in [str(path.relative_to(folder))]
        }
        layout = {"world_size": 1, "tp": 1, "dp": 1, "pp": 1, "vpp": 1}
        Manifest(
            step=0, serial=1, layouts={self.source.role: layout}, versions=versions(), metrics={},
            files=files,
        ).write(folder)  # fmt: skip
