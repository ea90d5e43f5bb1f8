"""What every kind of model folder offers, whatever its format.

A folder gives whole tensors (no padding, no parallel layout) under Megatron's parameter names with
global layer numbers (see names.py), or any tensor parallel rank's part of them. A tied output layer
is not a tensor of its own: `embedding.word_embeddings.weight` stands for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_rl.convert.names import Rule, all_rules
from megatron_rl.models.architecture import Architecture

Head = Literal["lm", "value"]
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_WEIGHT, OUTPUT_BIAS = "output_layer.weight", "output_layer.bias"
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Shape and dtype of a tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ModelFolder(Protocol):
    """The weights of one role in a folder.

    Attributes:
        kind: name of the format (kinds.py).
        path: the folder that was opened (a step's folder where a run's was named).
        head: "lm" (vocabulary logits) or "value" (one number).
        fresh_head: the folder has no value head and the model's starts at zero.
        companion_folder: where `companions` lie; a tokenizer is loaded from there.
        note: what the log says when a model starts from the folder; may be empty.
    """

    kind: str
    path: Path
    role: str
    architecture: Architecture
    head: Head
    fresh_head: bool
    companion_folder: Path
    note: str

    def check(self) -> None:
        """Compares names, shapes and file sizes with what the architecture needs.

        Raises:
            ValueError: listing what is missing, unexpected or of another shape.
        """

    def tensors(self) -> dict[str, TensorInfo]:
        """Whole tensors by Megatron name, in the order of the model; a fresh head is left out."""

    def read_into(
        self, name: str, out: Tensor, *, tp: int = 1, rank: int = 0, ep: int = 1
    ) -> None:
        """Fills `out` with the part of tensor parallel rank `rank` of `tp`, padding included.

        Args:
            ep: parts of the tensor parallel group that experts are spread over.
            out: contiguous, of the part's shape, any dtype and device.
        """

    def source_files(self) -> list[Path]:
        """The files that weights are read from: a conversion is only resumed if none changed."""

    def companions(self) -> dict[str, Path]:
        """Files that travel with the model (config.json, tokenizer, chat template, generation
        settings): name inside the folder → path."""

    def layout(self) -> dict[str, int]:
        """tp, pp and vpp of the run that saved it; empty where there was none."""

    def details(self) -> dict[str, str]:
        """What `inspect` shows beside architecture and sizes."""


def head_of(role: str) -> Head:
    """The head that a role computes with."""
    return "value" if role in ("critic", "reward") else "lm"


def stored_rules(architecture: Architecture, head: Head) -> dict[str, Rule]:
    """Rules of the tensors that a folder stores: a tied output layer is left out."""
    rules = all_rules(architecture, head=head)
    if head == "lm" and architecture.tied:
        rules.pop(OUTPUT_WEIGHT)
    return rules


def whole(folder: ModelFolder, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """One whole tensor of a folder on the CPU."""
    info = folder.tensors()[name]
    out = torch.empty(info.shape, dtype=dtype or info.dtype)
    folder.read_into(name, out)
    return out


def listing(names: list[str] | set[str], limit: int = 8) -> str:
    """`a, b, c and 5 more`, or `none`."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit]) or "none"
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"
