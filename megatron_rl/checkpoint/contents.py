"""What a checkpoint holds: gathers it from the running objects, and puts it back."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.checkpoint.folder import (
    STATE,
    TENSORS,
    CheckpointError,
    Manifest,
    small_json,
)
from megatron_rl.checkpoint.rank_files import rank_file, read_rank_file, snapshot
from megatron_rl.checkpoint.safe_loading import read_tensors
from megatron_rl.checkpoint.sharded import sharded_tensors
from megatron_rl.checkpoint.tensors import (
    clear_padding,
    optimizer_entries,
    optimizer_facts,
    restore_optimizer,
    total_bytes,
    weight_entries,
)
from megatron_rl.checkpoint.writer import Contents
from megatron_rl.engine.optimizer import Trainable
from megatron_rl.parallel import Layout, ParallelGroups
from megatron_rl.stopping import Stateful
from megatron_rl.versions import VERSION


@dataclass(kw_only=True, slots=True)
class RunState:
    """The objects of a run whose state makes up a checkpoint.

    Attributes:
        trainables: by role.
        states: JSON, the same on all ranks.
        rank_states: tensors and JSON of each rank's own.
        config: the run's settings as nested JSON; kept for people, compared on resume.
        companions: contents of small files that travel with the model, by name.
    """

    groups: ParallelGroups
    control: dist.ProcessGroup
    trainables: dict[str, Trainable] = field(default_factory=dict)
    states: dict[str, Stateful] = field(default_factory=dict)
    rank_states: dict[str, Stateful] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    companions: dict[str, bytes] = field(default_factory=dict)

    def layouts(self) -> dict[str, dict[str, int]]:
        """Layout of the run and of each role: per-rank states carry over only if all are equal."""
        layouts = {"run": _sizes(self.groups.layout)}
        return layouts | {r: _sizes(t.model.groups.layout) for r, t in self.trainables.items()}

    def collect(self, step: int, metrics: dict[str, float], *, copy_to_cpu: bool) -> Contents:
        """This rank's part of a checkpoint; a collective.

        Args:
            copy_to_cpu: copy the tensors, so that training can go on while they are written.
        """
        entries, roles = [], {}
        for role, trainable in self.trainables.items():
            trainable.finish_param_gather()
            entries += weight_entries(role, trainable.model)
            entries += optimizer_entries(role, trainable)
            roles[role] = self._role_record(trainable)
        states = {name: state.state_dict() for name, state in self.states.items()}
        rank_tensors: dict[str, Any] = {}
        rank_tree = snapshot(
            {name: state.state_dict() for name, state in self.rank_states.items()}, rank_tensors
        )
        return Contents(
            step=step, metrics=metrics, layouts=self.layouts(), versions=versions(),
            tensors=sharded_tensors(entries, writing=True, copy_to_cpu=copy_to_cpu),
            nbytes=total_bytes(entries) + sum(t.nbytes for t in rank_tensors.values()),
            state_json=small_json({"roles": roles, "states": states, "config": self.config}),
            rank_tree=rank_tree, rank_tensors=rank_tensors, companions=self.companions,
        )  # fmt: skip

    def _role_record(self, trainable: Trainable) -> dict[str, Any]:
        facts: list[dict[str, Any]] = [{} for _ in range(self.control.size())]
        dist.all_gather_object(facts, optimizer_facts(trainable), group=self.control)
        steps = {f["step"] for f in facts} - {None}
        assert len(steps) <= 1, f"ranks count different optimizer steps: {steps}"
        optimizer = {
            **facts[0], "states": sorted({name for f in facts for name in f["states"]}),
            "step": steps.pop() if steps else None,
        }  # fmt: skip
        return {
            **_identity(trainable), "optimizer": optimizer, "trainable": trainable.state_dict()
        }  # fmt: skip

    def restore(self, folder: Path, manifest: Manifest) -> list[str]:
        """Puts a checkpoint's state into the running objects; local to each rank.

        Returns:
            Sentences about what does not carry over and which settings were changed.

        Raises:
            CheckpointError: if the checkpoint is of another model, optimizer or dtype, or lacks a
                part; nothing has been changed then.
        """
        saved = json.loads((folder / STATE).read_text())
        if "states" not in saved:
            raise CheckpointError(
                f"{folder} holds weights only, no run to go on with: start from it with "
                "model.actor.path and set checkpoint.resume=auto"
            )
        for role, trainable in self.trainables.items():
            _check_role(folder, role, trainable, saved["roles"].get(role))
        _check_names(folder, "state", set(self.states), set(saved["states"]))
        rank_tree, notes = self._rank_tree(folder, manifest)
        entries = []
        for role, trainable in self.trainables.items():
            restore_optimizer(trainable, saved["roles"][role]["optimizer"])
            entries += weight_entries(role, trainable.model)
            entries += optimizer_entries(role, trainable)
        clear_padding(entries)
        read_tensors(folder / TENSORS, sharded_tensors(entries, writing=False))
        for role, trainable in self.trainables.items():
            trainable.load_state_dict(saved["roles"][role]["trainable"])
        for name, state in self.states.items():
            state.load_state_dict(saved["states"][name])
        for name, state in self.rank_states.items():
            if rank_tree is not None:
                state.load_state_dict(rank_tree[name])
        unused = sorted(set(saved["roles"]) - set(self.trainables))
        unused += sorted(set(saved["states"]) - set(self.states))
        if unused:
            notes.append(f"{folder} also holds {', '.join(unused)}, which this run does not use")
        before, now = _flat(saved["config"]), _flat(json.loads(json.dumps(self.config)))
        changed = [
            f"{key}: {before.get(key)!r} → {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if changed:
            notes.append(f"settings changed since {folder} was saved: {'; '.join(changed)}")
        return notes

    def _rank_tree(self, folder: Path, manifest: Manifest) -> tuple[Any, list[str]]:
        """This rank's own state, or None where the layout is another one."""
        if not self.rank_states:
            return None, []
        if manifest.layouts != self.layouts():
            names = ", ".join(sorted(self.rank_states))
            return None, [
                f"{folder} was saved with the layout {_text(manifest.layouts)} and is resumed with "
                f"{_text(self.layouts())}: each rank's own state ({names}) does not carry over and "
                "starts fresh; weights, optimizers, schedules and data position do carry over"
            ]
        tree = read_rank_file(rank_file(folder, self.control.rank()))
        _check_names(folder, "rank state", set(self.rank_states), set(tree))
        return tree, []


def _sizes(layout: Layout) -> dict[str, int]:
    return {name: getattr(layout, name) for name in ("world_size", "tp", "dp", "pp", "vpp")}


def _text(layouts: dict[str, dict[str, int]]) -> str:
    """`run tp=2 dp=1 pp=2 vpp=1`, roles only where they differ from the run."""
    shown = {n: x for n, x in layouts.items() if n == "run" or x != layouts["run"]}
    return "; ".join(
        name + "".join(f" {k}={v}" for k, v in sizes.items() if k != "world_size")
        for name, sizes in shown.items()
    )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _identity(trainable: Trainable) -> dict[str, Any]:
    """What must be equal between the checkpoint and the run."""
    model = trainable.model
    return {
        "architecture": json.loads(json.dumps(asdict(model.arch))), "head": model.head,
        "dtype": str(model.config.params_dtype).removeprefix("torch."),
    }  # fmt: skip


def _check_role(
    folder: Path, role: str, trainable: Trainable, saved: dict[str, Any] | None
) -> None:
    if saved is None:
        raise CheckpointError(
            f"{folder} holds no {role}: it was saved by a run without one; resume with that run's "
            "algorithm, or set checkpoint.resume=never and start from model weights"
        )
    here = _identity(trainable) | {"optimizer": trainable.settings.name}
    there = {k: saved[k] for k in ("architecture", "head", "dtype")}
    there["optimizer"] = saved["optimizer"]["name"]
    for key, value in here.items():
        found = there[key]
        if value == found:
            continue
        if isinstance(value, dict):
            names = [k for k in value if value[k] != found.get(k)]
            value, found = ({k: x.get(k) for k in names} for x in (value, found))
        raise CheckpointError(
            f"{folder} was saved with {role} {key} {found}, this run has {value}: use the same "
            "one, or set checkpoint.resume=never and start from model weights"
        )


def _check_names(folder: Path, what: str, needed: set[str], found: set[str]) -> None:
    missing = sorted(needed - found)
    if missing:
        raise CheckpointError(
            f"{folder} lacks the {what} {', '.join(missing)}: it was saved by a run without it, "
            "and going on would not be the same run; set checkpoint.resume=never to start anew"
        )


def versions() -> dict[str, str]:
    """Of this program and the libraries whose formats a checkpoint depends on."""
    names = ("torch", "megatron-core", "transformers")
    return {"megatron-rl": VERSION} | {name: importlib.metadata.version(name) for name in names}
