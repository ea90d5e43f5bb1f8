"""Writes a folder file by file so that it appears complete or not at all, and can be resumed.

A folder NAME is made as `.NAME.partial` beside its place. Each finished file leaves a record there;
a later run with the same plan skips those files. When all are there, the folder gets its name.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.checkpoint import faults
from megatron_rl.checkpoint.folder import fsync, put_in_place, write_text
from megatron_rl.convert.progress import Progress

Advance = Callable[[int], None]
_RECORDS = ".records"
_SMALL_FILES = 64 * 2**20  # room for tokenizer, index and the like


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFile:
    """A file of the result: its path inside the folder and about how large it will be."""

    name: str
    nbytes: int


class Plan(Protocol):
    """What a folder will hold."""

    files: list[PlannedFile]

    def write(self, file: PlannedFile, path: Path, advance: Advance) -> dict[str, Any]:
        """Writes one file to `path`, forces it to storage and tells `advance` bytes done.

        Returns:
            A JSON record that `finish` gets, also when the file was written by an earlier run.
        """

    def finish(self, folder: Path, records: dict[str, dict[str, Any]]) -> None:
        """Writes the small files once all others are there."""


def carry_out(
    plan: Plan, target: Path, *, identity: dict[str, Any], label: str, overwrite: bool = False
) -> int:
    """Makes the folder `target`.

    Args:
        identity: JSON that says what is made of what; a partial result of another identity is
            thrown away.

    Returns:
        How many files an earlier, interrupted run had already written.

    Raises:
        ValueError: if `target` exists, or the file system is too full.
    """
    if target.exists() and not overwrite:
        raise ValueError(
            f"--to is {str(target)!r}, which exists: name a new folder, or pass --overwrite to "
            "replace it when the conversion is complete"
        )
    aside = target.with_name(f".{target.name}.partial")
    records = _finished(aside, plan, identity)
    left = [file for file in plan.files if file.name not in records]
    _check_space(target, sum(file.nbytes for file in left))
    _prepare(aside, identity)
    skipped = len(records)
    try:
        with Progress(label, sum(file.nbytes for file in plan.files)) as progress:
            progress.advance(sum(f.nbytes for f in plan.files if f.name in records))
            for file in left:
                records[file.name] = _write(plan, file, aside, progress.advance)
            plan.finish(aside, records)
    except (OSError, RuntimeError) as error:
        # torch.save raises an error of its own while it handles that of the file.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError) or reason.errno != errno.ENOSPC:
            raise
        raise ValueError(
            f"the file system of {target.parent} is full: free some space and run the same command "
            "again, it goes on with the file it was at"
        ) from error
    for path in aside.rglob("*"):
        fsync(path)
    shutil.rmtree(aside / _RECORDS)
    fsync(aside)
    faults.reach("before_rename", 0)
    put_in_place(aside, target)
    return skipped


def _write(plan: Plan, file: PlannedFile, aside: Path, advance: Advance) -> dict[str, Any]:
    final = aside / file.name
    final.parent.mkdir(parents=True, exist_ok=True)
    writing = final.with_name(f"{final.name}.writing")
    faults.reach("before_shard", 0)
    record = plan.write(file, writing, advance)
    writing.rename(final)
    fsync(final.parent)
    text = json.dumps({"file": file.name, "size": final.stat().st_size, "record": record})
    write_text(aside / _RECORDS / f"{final.name}.json", text)
    faults.reach("after_shard", 0)
    return record


def _finished(aside: Path, plan: Plan, identity: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Records of the files that an earlier run of the same plan completed."""
    try:
        if json.loads((aside / _RECORDS / "identity").read_text()) != _as_json(identity):
            return {}
        found = [json.loads(p.read_text()) for p in (aside / _RECORDS).glob("*.json")]
    except (OSError, ValueError):
        return {}
    planned = {file.name for file in plan.files}
    return {
        entry["file"]: entry["record"]
        for entry in found
        if entry["file"] in planned
        and (aside / entry["file"]).is_file()
        and (aside / entry["file"]).stat().st_size == entry["size"]
    }


def _prepare(aside: Path, identity: dict[str, Any]) -> None:
    """Makes the folder, or keeps the one of an earlier run with the same identity."""
    place = aside / _RECORDS / "identity"
    try:
        same = json.loads(place.read_text()) == _as_json(identity)
    except (OSError, ValueError):
        same = False
    if not same:
        shutil.rmtree(aside, ignore_errors=True)
        place.parent.mkdir(parents=True)
        write_text(place, json.dumps(identity))


def _as_json(identity: dict[str, Any]) -> Any:
    return json.loads(json.dumps(identity))


def _check_space(target: Path, nbytes: int) -> None:
    parent = next(p for p in target.absolute().parents if p.exists())
    needed, free = nbytes + _SMALL_FILES, shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(
            f"--to is {str(target)!r}: {needed / 2**30:,.2f} GiB are needed, {parent} has "
            f"{free / 2**30:,.2f} GiB free; free some space or choose another file system"
        )


def fill_files(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `max_bytes` (a larger one stands alone)."""
    groups: list[list[str]] = []
    filled = max_bytes
    for name, size in sizes.items():
        if filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups
