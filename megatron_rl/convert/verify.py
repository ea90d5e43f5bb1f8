"""Compares two model folders: is one a faithful conversion of the other?

The weights are compared under Hugging Face names, one tensor in memory at a time. An error in the
name table could hide there, since it is used in both directions; the comparison with transformers
on real text shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.checkpoint.folder import damage
from megatron_rl.convert.hf_writer import export_plan
from megatron_rl.convert.huggingface import HuggingFaceFolder
from megatron_rl.convert.megatron import MegatronFolder
from megatron_rl.convert.model_folder import ModelFolder, TensorInfo, listing
from megatron_rl.convert.progress import Progress

_REWRITTEN = {
    "dtype", "torch_dtype", "architectures", "id2label", "label2id", "num_labels",
    "transformers_version",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the report."""

    name: str
    outcome: Literal["equal", "differs", "not run"]
    detail: str


def compare(source: ModelFolder, result: ModelFolder) -> Iterator[Row]:
    """Compares everything but what the models compute, cheapest first.

    Yields one row per question; later ones are left out where an earlier answer makes them
    meaningless.
    """
    for folder in (source, result):
        try:
            folder.check()
        except ValueError as error:
            yield Row(name="strict load", outcome="differs", detail=str(error))
            return
    count = len(result.tensors())
    yield Row(name="strict load", outcome="equal", detail=f"{count} Megatron tensors, no other")
    different = [
        f"{f.name} {a} → {b}"
        for f in fields(source.architecture)
        for a, b in [(getattr(x.architecture, f.name) for x in (source, result))]
        if a != b
    ]
    yield _row("architecture", different, source.architecture.family)
    views = [_view(folder) for folder in (source, result)]
    yield from _compare_names(*(tensors for tensors, _ in views))
    yield from _compare_weights(*views)
    yield from _compare_companions(source, result)
    yield from _checksums([source, result])


def _row(name: str, differences: list[str], detail: str) -> Row:
    if differences:
        return Row(name=name, outcome="differs", detail=listing(differences, limit=4))
    return Row(name=name, outcome="equal", detail=detail)


def _view(folder: ModelFolder) -> tuple[dict[str, TensorInfo], Callable[[str], Tensor]]:
    """The tensors of a folder under Hugging Face names: its own, or what an export would hold."""
    if isinstance(folder, HuggingFaceFolder):
        names = folder.weights.names() - folder.ignored()
        infos = {name: folder.weights.info(name) for name in sorted(names)}
        return infos, lambda name: folder.weights(name)[:]
    plan = export_plan(folder, dtype=None, max_bytes=2**62)
    return plan.tensors, plan.read


def _compare_names(old: dict[str, TensorInfo], new: dict[str, TensorInfo]) -> Iterator[Row]:
    differences = [f"only in --from: {n}" for n in sorted(old.keys() - new.keys())]
    differences += [
        f"only in --to: {n}" for n in sorted(new.keys() - old.keys()) if n != "score.weight"
    ]
    yield _row("names", differences, f"{len(new)} tensors")
    both = old.keys() & new.keys()
    yield _row(
        "shapes", [n for n in sorted(both) if old[n].shape != new[n].shape], f"{len(both)} tensors"
    )
    casts = {(old[n].dtype, new[n].dtype) for n in both if old[n].dtype != new[n].dtype}
    sizes = [sum(infos[n].nbytes for n in both) for infos in (old, new)]
    text = f"{sizes[1]:,} bytes"
    if casts:
        named = ", ".join(f"{_short(a)} → {_short(b)}" for a, b in sorted(casts, key=str))
        text = f"{sizes[0]:,} → {sizes[1]:,} bytes, cast {named}"
    yield _row("bytes", [] if casts or sizes[0] == sizes[1] else [text], text)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare_weights(old, new) -> Iterator[Row]:
    """Bit for bit, in the dtype of the result (a cast is repeated here)."""
    (old_infos, read_old), (new_infos, read_new) = old, new
    both = [n for n in new_infos if n in old_infos and old_infos[n].shape == new_infos[n].shape]
    differences = []
    with Progress("comparing", sum(new_infos[n].nbytes for n in both)) as progress:
        for name in both:
            expected, found = read_old(name).to(new_infos[name].dtype), read_new(name)
            if not torch.equal(_bits(expected), _bits(found)):
                gap = (expected.double() - found.double()).abs().max().item()
                differences.append(f"{name} by up to {gap:.3g}")
            progress.advance(new_infos[name].nbytes)
    yield _row("weights, bit for bit", differences, f"{len(both)} tensors")
    fresh = [n for n in new_infos if n not in old_infos and n == "score.weight"]
    if fresh and bool(read_new(fresh[0]).any()):
        yield Row(name="fresh head", outcome="differs", detail="it is not zero")


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _compare_companions(source: ModelFolder, result: ModelFolder) -> Iterator[Row]:
    old, new = source.companions(), result.companions()
    differences = [f"{name} is missing" for name in sorted(old.keys() - new.keys())]
    for name in sorted(old.keys() & new.keys()):
        if name == "config.json":
            a, b = (_settings(files[name]) for files in (old, new))
            differences += [f"config.json: {k}" for k in sorted(a.keys() | b.keys())
                            if a.get(k) != b.get(k)]  # fmt: skip
        elif old[name].read_bytes() != new[name].read_bytes():
            differences.append(name)
    yield _row("tokenizer and settings", differences, f"{len(old)} files")


def _settings(path: Path) -> dict:
    return {k: v for k, v in json.loads(path.read_text()).items() if k not in _REWRITTEN}


def _checksums(folders: list[ModelFolder]) -> Iterator[Row]:
    for folder in folders:
        if isinstance(folder, MegatronFolder):
            files = folder.manifest.files
            found = [p for item in files.items() if (p := damage(folder.path, *item))]
            yield _row("checksums", found, f"{len(files)} files of {folder.path}")
