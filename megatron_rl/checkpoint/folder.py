"""The folder of a run's checkpoints: names, manifests, atomic appearance, and which one is newest.

    step_00000003/            appears complete or not at all (written aside, then renamed)
      manifest.json           step, serial, layout, versions, and size and checksum of every file
      state.json              the run's small state
      tensors/                weights and optimizers, Megatron's torch_dist format
      ranks/                  one file per rank: random state and the like
      huggingface/            config.json, tokenizer and chat template of the actor
    latest                    name of the newest checkpoint, for people and scripts

Nothing here locks or communicates; only rank 0 calls what writes shared files. A save's `serial` is
one more than any serial in the folder, so the newest checkpoint is known even where a crash came
between the rename and `latest`, or where a run went back to an earlier step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError

MANIFEST, STATE, TENSORS, COMPANIONS = "manifest.json", "state.json", "tensors", "huggingface"
VERSION = 1


class CheckpointError(ConfigError):
    """A checkpoint can't be written or used; the message says which and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds; `files` maps paths inside the folder to their records."""

    step: int
    serial: int
    layouts: dict[str, dict[str, int]]
    versions: dict[str, str]
    metrics: dict[str, float]
    files: dict[str, FileRecord] = field(default_factory=dict)
    version: int = VERSION

    def write(self, folder: Path) -> None:
        write_text(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises `CheckpointError` if there is none that can be read."""
        path = folder / MANIFEST
        try:
            record = json.loads(path.read_text())
            files = {name: FileRecord(**file) for name, file in record.pop("files").items()}
            manifest = cls(**record, files=files)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is not a checkpoint of this program: it has no {MANIFEST}; name a "
                "step_… folder, or the folder that holds them"
            ) from None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error})") from error
        if manifest.version != VERSION:
            raise CheckpointError(
                f"{path} has format {manifest.version}, this program reads {VERSION}: use the "
                "program version that wrote it"
            )
        return manifest


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return root / f".step_{step:08d}.partial"


def checkpoints(root: Path) -> list[tuple[Path, int | None]]:
    """Complete checkpoints with their serials, newest first.

    One whose manifest can't be read stands where its step number puts it, with serial None.
    """
    found: list[tuple[Path, int | None, int]] = []
    for path in sorted(root.glob("step_" + "[0-9]" * 8)):
        step = int(path.name.removeprefix("step_"))
        try:
            found.append((path, Manifest.read(path).serial, step))
        except CheckpointError:
            found.append((path, None, step))
    readable = sorted((f for f in found if f[1] is not None), key=lambda f: f[1], reverse=True)
    for damaged in (f for f in found if f[1] is None):
        at = next((i for i, f in enumerate(readable) if f[2] < damaged[2]), len(readable))
        readable.insert(at, damaged)
    return [(path, serial) for path, serial, _ in readable]


def next_serial(root: Path) -> int:
    return 1 + max((serial or 0 for _, serial in checkpoints(root)), default=0)


def fsync(path: Path) -> None:
    """Forces a file's bytes, or a folder's names, to storage."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes a small file that is never seen half-written, and forces it to storage."""
    aside = path.with_name(f".{path.name}.new")
    try:
        with aside.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def record_of(path: Path) -> FileRecord:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(size=path.stat().st_size, sha256=digest)


def damage(folder: Path, name: str, record: FileRecord) -> str | None:
    """What is wrong with a file, or None."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path} has {size} bytes instead of {record.size}: it is cut short or replaced"
        if record_of(path) != record:
            return f"{path} has another checksum than when it was written: its contents changed"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    return None


def put_in_place(aside: Path, final: Path) -> None:
    """Renames a finished folder to its name; one of that name (same step, older) is removed."""
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        aside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(final)
    fsync(final.parent)


def remove_leftovers(root: Path) -> None:
    """Removes what interrupted saves left; a replaced checkpoint whose successor never came back
    gets its name back."""
    for old in root.glob(".step_*.old"):
        final = root / old.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(final)
    for partial in root.glob(".step_*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint so that it is neither used nor in the way of a new one."""
    target, number = folder.with_name(f"{folder.name}.corrupt"), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.corrupt{number}")
    folder.rename(target)
    return target


def prune(root: Path, *, keep_last: int, keep_every: int | None, best_metric: str | None) -> None:
    """Removes checkpoints that no rule keeps: the newest `keep_last`, every `keep_every`-th step,
    and the one with the largest `best_metric`."""
    manifests = []
    for path, serial in checkpoints(root):
        if serial is not None:
            manifests.append((path, Manifest.read(path)))
    keep = {path for path, _ in manifests[:keep_last]}
    if keep_every is not None:
        keep |= {path for path, m in manifests if m.step % keep_every == 0}
    scored = [(p, m) for p, m in manifests if best_metric in m.metrics]
    if scored:
        keep.add(max(scored, key=lambda s: (s[1].metrics[best_metric], s[1].serial))[0])
    for path, _ in manifests:
        if path not in keep:
            _remove(path)


def _remove(folder: Path) -> None:
    """Removes a checkpoint; its name goes first, so that it is never seen in part."""
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def small_json(value: Any) -> str:
    """JSON text of a small state.

    Raises:
        ValueError: if it holds anything but JSON.
    """
    try:
        return json.dumps(value, indent=1) + "\n"
    except TypeError as error:
        raise ValueError(f"a state given to add_state is not JSON: {error}") from error
