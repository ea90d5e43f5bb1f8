"""The kinds of model folder: one entry each, used by the command line and by `model.<role>.path`.

A further format is one more `Kind` in `KINDS`: a class with the interface of `ModelFolder` to read
it, and a `staging.Plan` to write it (see megatron.py for both). The commands `X-to-Y` follow from
the entries that can be read and those that can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.convert.hf_weights import HuggingFaceWeights
from megatron_rl.convert.hf_writer import export_plan
from megatron_rl.convert.huggingface import HuggingFaceFolder
from megatron_rl.convert.megatron import MegatronFolder, MegatronPlan, find_step, stored_roles
from megatron_rl.convert.megatron_lm import MegatronLMFolder, MegatronLMPlan, is_megatron_lm
from megatron_rl.convert.model_folder import ModelFolder
from megatron_rl.convert.staging import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How a folder is written.

    Attributes:
        dtype: of all tensors; None keeps each tensor's own.
        max_bytes: largest file (a tensor that is larger stands alone).
        head_name: name of a value head's tensors in a Hugging Face folder.
    """

    dtype: torch.dtype | None = None
    max_bytes: int = 5 * 10**9
    head_name: str = "score"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One format of model folders.

    Attributes:
        name: as in the commands' names.
        marks: what such a folder holds, for messages.
        recognises: whether a folder is of this kind, from its file names alone.
        roles: the roles that it can be read as without a fresh head; the first is the default.
        open: (folder, role, full precision where the folder has it) → the model in it.
        plan: how a folder of this kind is written; None where that is not offered.
    """

    name: str
    title: str
    marks: str
    recognises: Callable[[Path], bool]
    roles: Callable[[Path], list[str]]
    open: Callable[[Path, str, bool], ModelFolder]
    plan: Callable[[ModelFolder, WriteOptions], Plan] | None


def _huggingface_roles(path: Path) -> list[str]:
    names = HuggingFaceWeights(path).names()
    return ["reward", "critic"] if "score.weight" in names else ["actor", "reference"]


KINDS: tuple[Kind, ...] = (
    Kind(
        name="hf", title="Hugging Face", marks="config.json and *.safetensors",
        recognises=lambda path: (path / "config.json").is_file(),
        roles=_huggingface_roles,
        open=lambda path, role, _: HuggingFaceFolder(path, role),
        plan=lambda folder, o: export_plan(
            folder, dtype=o.dtype, max_bytes=o.max_bytes, head_name=o.head_name
        ),
    ),
    Kind(
        name="megatron", title="Megatron", marks="manifest.json, or step_… folders",
        recognises=lambda path: find_step(path) is not None,
        roles=lambda path: list(stored_roles(path)),
        open=lambda path, role, full: MegatronFolder(path, role, full_precision=full),
        plan=lambda folder, o: MegatronPlan(folder, dtype=o.dtype, max_bytes=o.max_bytes),
    ),
    Kind(
        name="megatron-lm", title="Megatron-LM",
        marks="latest_checkpointed_iteration.txt, or an iteration's files",
        recognises=is_megatron_lm,
        roles=lambda _: ["actor", "reference"],
        open=lambda path, role, _: MegatronLMFolder(path, role),
        plan=lambda folder, o: MegatronLMPlan(folder, dtype=o.dtype, max_bytes=o.max_bytes),
    ),
)  # fmt: skip


def kind_of(path: str | Path) -> Kind:
    """The kind of an existing folder.

    Raises:
        ValueError: if there is no such folder or it is of no known kind.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{str(path)!r}: there is no such folder")
    for kind in KINDS:
        if kind.recognises(path):
            return kind
    known = "; ".join(f"no {kind.marks} ({kind.title})" for kind in KINDS)
    raise ValueError(f"{str(path)!r} is no model folder: {known}")


def open_model(path: str | Path, role: str, *, full_precision: bool = False) -> ModelFolder:
    """Opens a folder of any kind as one role's model; reads headers, no weights.

    Raises:
        ValueError: if it is no model folder, of an unknown architecture, or lacks the role.
    """
    return kind_of(path).open(Path(path), role, full_precision)
