"""The tensors of one iteration's folder under this project's names, whatever format they are in.

A store gives rectangles of whole tensors (all tensor parallel ranks together) and what the folder
says about the model. Vocabularies are as they were saved, padding included.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_rl.checkpoint.cuts import Piece, cut_of, pieces
from megatron_rl.convert.megatron_lm.arguments import Arguments, get
from megatron_rl.convert.megatron_lm.locate import COMMON, RANK_FILE, RANK_FOLDER
from megatron_rl.convert.megatron_lm.naming import (
    of_the_model,
    our_name,
    split_layer,
    with_layer,
)
from megatron_rl.convert.megatron_lm.plain_pickle import read_plain
from megatron_rl.convert.model_folder import TensorInfo
from megatron_rl.convert.names import Rule, Vocabulary
from megatron_rl.convert.torch_dist import TorchDistFolder, overlap
from megatron_rl.models.architecture import Architecture


class Store(Protocol):
    """The tensors of one folder, and what it says about them.

    Attributes:
        arguments: the stored command line.
        arguments_file: where it was read from.
        iteration: training steps done.
        tensors: whole tensors by our name.
    """

    arguments: Arguments
    arguments_file: Path
    iteration: int
    tensors: dict[str, TensorInfo]

    def read(self, name: str, out: Tensor, offset: tuple[int, ...]) -> None:
        """Fills `out` with the rectangle of its shape at `offset`."""

    def files(self, names: Iterable[str]) -> list[Path]:
        """The files that hold these tensors."""


def _command_line(table: dict[str, Any], path: Path) -> Arguments:
    arguments = table.get("args")
    if not isinstance(arguments, Arguments):
        raise ValueError(
            f"{path} has no 'args': without Megatron-LM's stored command line the architecture is "
            "not known; save the checkpoint with Megatron-LM's training script"
        )
    return arguments


class TorchDistStore:
    """A `torch_dist` folder, of equal layers (one tensor for all) or with numbered ones."""

    def __init__(self, folder: Path) -> None:
        self.arguments_file = folder / COMMON
        table = read_plain(self.arguments_file)
        self.arguments = _command_line(table, self.arguments_file)
        self.iteration = int(get(self.arguments, "iteration", default=table.get("iteration") or 0))
        self._folder = TorchDistFolder(folder)
        self._stored: dict[str, tuple[str, int | None]] = {}
        self.tensors = {}
        for key, info in self._folder.tensors.items():
            if of_the_model(key):
                self._add(key, info)

    def _add(self, key: str, info: TensorInfo) -> None:
        name = our_name(key)
        if not name.startswith("decoder.layers.") or split_layer(name)[1] is not None:
            self._stored[name], self.tensors[name] = (key, None), info
            return
        for layer in range(info.shape[0]):
            mine = with_layer(name, layer)
            self._stored[mine] = key, layer
            self.tensors[mine] = TensorInfo(shape=info.shape[1:], dtype=info.dtype)

    def read(self, name: str, out: Tensor, offset: tuple[int, ...]) -> None:
        """See `Store`."""
        key, layer = self._stored[name]
        if layer is not None:
            out, offset = out[None], (layer, *offset)
        self._folder.read(key, out, offset)

    def files(self, names: Iterable[str]) -> list[Path]:
        """See `Store`."""
        found = self._folder.files(self._stored[name][0] for name in names)
        return [self.arguments_file, *found]


class LegacyStore:
    """A `torch` folder: one file per tensor and pipeline parallel rank, put together again.

    Every rank's tensor lies in the whole one as convert/names.py's rules cut it.
    """

    def __init__(self, folder: Path) -> None:
        self._files = sorted(p / RANK_FILE for p in folder.glob(RANK_FOLDER))
        tables = {_ranks(path): read_plain(path, mmap=True) for path in self._files}
        self.arguments_file = self._files[0]
        first = tables[min(tables)]
        self.arguments = _command_line(first, self.arguments_file)
        self.iteration = int(first.get("iteration") or 0)
        self._tp = 1 + max(tp for tp, _ in tables)
        pp = 1 + max(pp for _, pp in tables)
        missing = [f"{t:02d}_{p:03d}" for t in range(self._tp) for p in range(pp)
                   if (t, p) not in tables]  # fmt: skip
        if missing:
            raise ValueError(f"{folder} lacks the files of the ranks mp_rank_{', '.join(missing)}")
        self._parts = _named_parts(tables, self._tp, pp, folder)
        self._rules: dict[str, Rule] = {}
        self._architecture: Architecture | None = None
        self.tensors: dict[str, TensorInfo] = {}

    def describe(self, architecture: Architecture, rules: dict[str, Rule]) -> None:
        """Tells the store how its tensors were cut; `tensors` is known from here on."""
        self._architecture, self._rules = architecture, rules
        for name, parts in self._parts.items():
            if name in rules and len(parts) == self._tp:
                shape = list(parts[0].shape)
                cut = cut_of(rules[name], architecture, tuple(shape), tp=self._tp, rank=0)
                shape[cut.axis] *= 1 if cut.replicated else self._tp
            else:
                shape = list(parts[0].shape)
            self.tensors[name] = TensorInfo(shape=tuple(shape), dtype=parts[0].dtype)

    def _pieces(self, name: str) -> Iterable[Piece]:
        rule, arch = self._rules[name], self._architecture
        for rank, part in enumerate(self._parts[name]):
            cut = cut_of(rule, arch, tuple(part.shape), tp=self._tp, rank=rank)
            if rank == 0 or not cut.replicated:
                yield from pieces(cut, part.reshape(-1), 0)

    def read(self, name: str, out: Tensor, offset: tuple[int, ...]) -> None:
        """See `Store`; rows of a vocabulary's padding are not read."""
        covered = 0
        for piece in self._pieces(name):
            windows = overlap(offset, out.shape, piece.offset, piece.data.shape)
            if windows is not None:
                part = out[windows[0]]
                part.copy_(piece.data[windows[1]])
                covered += part.numel()
        if covered != out.numel():
            raise ValueError(f"{self.arguments_file.parent.parent}: {name} is not complete")

    def files(self, names: Iterable[str]) -> list[Path]:
        """See `Store`."""
        return self._files


def _ranks(path: Path) -> tuple[int, int]:
    """(tensor, pipeline) parallel rank of `mp_rank_TT[_PPP]/model_optim_rng.pt`."""
    numbers = path.parent.name.removeprefix("mp_rank_").split("_")
    if len(numbers) > 2 or not all(n.isdigit() for n in numbers):
        raise ValueError(f"{path.parent} is not mp_rank_TT or mp_rank_TT_PPP: expert parallel "
                         "checkpoints (mixture of experts) are not read")  # fmt: skip
    return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0


def _named_parts(
    tables: dict[tuple[int, int], dict[str, Any]], tp: int, pp: int, folder: Path
) -> dict[str, list[Tensor]]:
    """Each tensor's parts by tensor parallel rank, with layers numbered over the whole model.

    Virtual pipeline stages ("model0", "model1", …) go round the pipeline ranks.
    """
    found: dict[str, list[Tensor]] = {}
    first = tables[0, 0]
    chunks = ["model"] if "model" in first else sorted(k for k in first if k.startswith("model"))
    if not chunks or not isinstance(first[chunks[0]], dict):
        raise ValueError(f"{folder} holds no model")
    if "language_model" in first[chunks[0]]:
        raise ValueError(
            f"{folder} is of Megatron-LM's models before Megatron-Core: convert it with its "
            "tools/checkpoint/convert.py --saver core, or load it with --use-mcore-models"
        )
    offset = 0
    for chunk in sorted(chunks, key=lambda name: int(name.removeprefix("model") or 0)):
        for stage in range(pp):
            layers: set[int] = set()
            for rank in range(tp):
                for key, value in tables[rank, stage].get(chunk, {}).items():
                    if isinstance(value, Tensor) and of_the_model(key):
                        name, layer = split_layer(our_name(key))
                        if layer is not None:
                            layers.add(layer)
                            name = with_layer(name, layer + offset)
                        found.setdefault(name, []).append(value.detach())
            offset += len(layers)
    return found


def padded_rows(rule: Rule, info: TensorInfo, architecture: Architecture) -> TensorInfo:
    """`info` of a whole tensor without the padding of a vocabulary."""
    if not isinstance(rule, Vocabulary):
        return info
    return TensorInfo(shape=(architecture.vocab, *info.shape[1:]), dtype=info.dtype)

