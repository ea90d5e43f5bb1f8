"""Saves and resumes a run: everything that training needs to go on as if it had never stopped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megatron_rl.checkpoint.agreement import on_all_ranks, on_first_rank
from megatron_rl.checkpoint.background import Background
from megatron_rl.checkpoint.contents import RunState, Stateful
from megatron_rl.checkpoint.folder import (
    CheckpointError,
    Manifest,
    checkpoints,
    damage,
    next_serial,
    prune,
    remove_leftovers,
    set_aside,
    step_folder,
)
from megatron_rl.checkpoint.ownership import Claim
from megatron_rl.checkpoint.writer import Contents, check_space, write_checkpoint
from megatron_rl.engine.optimizer import Trainable
from megatron_rl.parallel import ParallelGroups, group_of

log = logging.getLogger("megatron_rl")


class CheckpointManager:
    """The checkpoints of one run in one folder; every method is a collective over all ranks.

    Args:
        folder: where the checkpoints are, seen by all ranks.
        keep_last: newest checkpoints to keep.
        keep_every: checkpoints of steps divisible by this are kept for good.
        best_metric: the checkpoint with the largest value of this metric is kept, too.
        async_save: `save` returns once the tensors are copied to host memory; writing goes on in
            the background. One copy exists at a time: a save waits for the one before.
        on_corrupt: "fail" ends with the damaged file's name, "previous" goes on with the checkpoint
            before.

        config: the run's settings, kept with each checkpoint; `load` says what was changed.

    Attributes:
        notes: after `load`, sentences about what did not carry over and what was changed.

    Raises:
        CheckpointError: if the folder can't be written.
    """

    def __init__(
        self, folder: Path, *, groups: ParallelGroups, keep_last: int, keep_every: int | None,
        best_metric: str | None = None, async_save: bool = False,
        on_corrupt: Literal["fail", "previous"] = "fail", config: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.groups = Path(folder), groups
        self.keep = {"keep_last": keep_last, "keep_every": keep_every, "best_metric": best_metric}
        self.async_save, self.on_corrupt = async_save, on_corrupt
        self.notes: list[str] = []
        self._pending: Background | None = None
        everyone = [list(range(dist.get_world_size()))]
        # Its own gloo group: a save in the background must not mix with other collectives.
        self._group = group_of(everyone, backend="gloo", purpose="checkpoint")
        self._run = RunState(groups=groups, control=self._group, config=config or {})
        self._claim: Claim | None = None
        on_first_rank(self._group, self._open_folder)

    def add_trainable(self, role: str, trainable: Trainable) -> None:
        """Weights, fp32 main parameters, optimizer and schedule of `role`."""
        self._run.trainables[role] = trainable

    def add_state(self, name: str, stateful: Stateful) -> None:
        """A small state that is JSON and the same on all ranks."""
        self._run.states[name] = stateful

    def add_rank_state(self, name: str, stateful: Stateful) -> None:
        """A state of each rank's own: tensors and JSON. It carries over to the same layout only."""
        self._run.rank_states[name] = stateful

    def add_companions(self, files: dict[str, Path]) -> None:
        """Small files that travel with the model (tokenizer and the like), read now."""
        self._run.companions = {name: path.read_bytes() for name, path in files.items()}

    def save(self, step: int, *, metrics: dict[str, float] | None = None) -> Path:
        """Saves everything under `step`.

        Returns:
            The checkpoint's folder (in the making, under `async_save`).

        Raises:
            CheckpointError: on all ranks alike; earlier checkpoints are untouched. Errors of a
                background save come with the next call.
        """
        self.wait()
        contents = on_all_ranks(
            self._group,
            lambda: self._run.collect(step, metrics or {}, copy_to_cpu=self.async_save),
        )
        check_space(self.folder, contents.nbytes, self._group)
        if not self.async_save:
            return self._write(contents)
        self._pending = Background(lambda: self._write(contents))
        return step_folder(self.folder, step)

    def wait(self) -> None:
        """Returns when no save is under way; raises what went wrong in a background save."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.finish()

    @property
    def saving(self) -> bool:
        """True while a background save of this rank is under way."""
        return self._pending is not None and self._pending.running

    def close(self) -> None:
        """Completes a pending save and gives the folder free; safe to call twice."""
        try:
            self.wait()
        finally:
            if self._claim is not None:
                self._claim.release()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        found = on_first_rank(self._group, lambda: checkpoints(self.folder))
        return next((folder for folder, serial in found if serial is not None), None)

    def load(self, path: Path | None = None) -> int | None:
        """Restores everything from `path`, or from the newest checkpoint in the folder.

        Returns:
            The step that was saved, or None if there is nothing to resume from.

        Raises:
            CheckpointError: for a damaged checkpoint (see `on_corrupt`), or one of another model,
                optimizer or dtype, on all ranks alike.
        """
        self.wait()
        self.notes = []
        candidates = on_first_rank(self._group, lambda: _candidates(self.folder, path))
        if not candidates:
            return None
        for folder in candidates:
            try:
                manifest = self._verify(folder)
            except CheckpointError as error:
                if self.on_corrupt == "fail" or path is not None:
                    raise CheckpointError(
                        f"{error}. This checkpoint can't be used: name another one in "
                        "checkpoint.resume, or with checkpoint.resume=auto set "
                        "checkpoint.on_corrupt=previous to go on from the one before it"
                    ) from error
                moved = on_first_rank(self._group, lambda folder=folder: set_aside(folder))
                self.notes.append(f"{error}. It was renamed to {moved.name} and not used")
                log.warning(self.notes[-1])
                continue
            self.notes += on_all_ranks(
                self._group, lambda folder=folder, m=manifest: self._run.restore(folder, m)
            )
            return manifest.step
        raise CheckpointError(f"no checkpoint in {self.folder} can be used: all are damaged")

    def _open_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.dir is {self.folder}, which can't be written ({error.strerror}); "
                "make it writable or set checkpoint.dir to another folder"
            ) from error
        self._claim = Claim(self.folder)
        remove_leftovers(self.folder)

    def _write(self, contents: Contents) -> Path:
        serial = on_first_rank(self._group, self._next_serial)
        path = write_checkpoint(self.folder, contents, self._group, serial)
        on_first_rank(self._group, lambda: prune(self.folder, **self.keep))
        return path

    def _next_serial(self) -> int:
        self._claim.check()
        return next_serial(self.folder)

    def _verify(self, folder: Path) -> Manifest:
        """Compares every file with the manifest, the files shared out over the ranks.

        Raises:
            CheckpointError: naming each damaged file.
        """
        manifest = on_first_rank(self._group, lambda: Manifest.read(folder))
        rank, size = self._group.rank(), self._group.size()

        def check() -> None:
            mine = sorted(manifest.files.items())[rank::size]
            found = [problem for file in mine if (problem := damage(folder, *file))]
            if found:
                raise CheckpointError("; ".join(found))

        on_all_ranks(self._group, check)
        return manifest


def _candidates(folder: Path, path: Path | None) -> list[Path]:
    """The checkpoints to try, newest first; of `path` only the one it names (or holds)."""
    if path is None:
        return [found for found, _ in checkpoints(folder)]
    inside = [found for found, _ in checkpoints(Path(path))]
    return inside[:1] or [Path(path)]
