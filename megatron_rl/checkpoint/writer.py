"""Writes one checkpoint: every rank its own files, then rank 0 the manifest and the name.

Collective over a gloo group that nothing else uses, so the same code runs in the foreground or, on
copies of the tensors, in a background thread while training goes on.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from megatron_rl.checkpoint import faults
from megatron_rl.checkpoint.agreement import on_all_ranks, on_first_rank
from megatron_rl.checkpoint.folder import (
    COMPANIONS,
    STATE,
    TENSORS,
    CheckpointError,
    FileRecord,
    Manifest,
    fsync,
    partial_folder,
    put_in_place,
    record_of,
    step_folder,
    write_text,
)
from megatron_rl.checkpoint.rank_files import rank_file, write_rank_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """Everything that this rank puts into a checkpoint; nothing in it changes any more.

    Attributes:
        tensors: name → sharded tensors that this rank writes.
        nbytes: their size.
        state_json: text of the small state (rank 0's is written).
        rank_tree, rank_tensors: this rank's own state (see rank_files.snapshot).
        companions: contents of small files that travel with the model, by name; rank 0's are
            written.
    """

    step: int
    layouts: dict[str, dict[str, int]]
    versions: dict[str, str]
    metrics: dict[str, float]
    tensors: dict[str, torch.Tensor]
    nbytes: int
    state_json: str
    rank_tree: Any
    rank_tensors: dict[str, torch.Tensor]
    companions: dict[str, bytes]


class _FaultyWriter(FileSystemWriter):
    """torch's writer with the named points of a save around this rank's shard."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, thread_count=1, sync_files=False)
        self.fault_rank = rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        faults.reach("before_shard", self.fault_rank)
        result = super().write_data(plan, planner)
        faults.reach("after_shard", self.fault_rank)
        return result


def write_checkpoint(root: Path, contents: Contents, group: dist.ProcessGroup, serial: int) -> Path:
    """Writes and publishes one checkpoint; a collective over `group`.

    Returns:
        The complete folder.

    Raises:
        CheckpointError: on all ranks alike; nothing is left under a final name.
    """
    aside = partial_folder(root, contents.step)
    try:
        on_first_rank(group, lambda: _prepare(aside))
        _write_tensors(aside / TENSORS, contents.tensors, group)
        mine = on_all_ranks(group, lambda: _write_own_files(aside, contents, group))
        records: list[dict[str, FileRecord]] = [{} for _ in range(group.size())]
        dist.all_gather_object(records, mine, group=group)
        files = {name: record for part in records for name, record in part.items()}
        return on_first_rank(group, lambda: _publish(root, aside, contents, files, serial))
    except CheckpointError:
        if group.rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def check_space(root: Path, nbytes: int, group: dist.ProcessGroup) -> None:
    """Refuses a save for which the file system is too full, before anything is written.

    Args:
        nbytes: what this rank will write.
    """
    total = torch.tensor([nbytes], dtype=torch.int64)
    dist.all_reduce(total, group=group)

    def check() -> None:
        free, needed = shutil.disk_usage(root).free, int(total)
        if free < needed:
            raise CheckpointError(
                f"a checkpoint needs {needed / 2**20:,.1f} MiB, but {root} has "
                f"{free / 2**20:,.1f} MiB free: free some space, lower checkpoint.keep_last, or "
                "set checkpoint.dir to a larger file system; earlier checkpoints are untouched"
            )

    on_first_rank(group, check)


def _prepare(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    (aside / TENSORS).mkdir(parents=True)


def _write_tensors(
    folder: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup
) -> None:
    """torch's collective save: each rank's shards in one file, the index by rank 0.

    torch checks here that the ranks' pieces fill every tensor exactly once.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        torch_checkpoint.save(
            tensors, storage_writer=_FaultyWriter(folder, group.rank()), planner=planner,
            process_group=group,
        )  # fmt: skip
    except CheckpointException as error:
        reasons = dict.fromkeys(f"{type(e).__name__}: {e}" for e, _ in error.failures.values())
        raise CheckpointError(
            f"writing {folder} failed ({'; '.join(reasons)}); earlier checkpoints are untouched"
        ) from error


def _write_own_files(
    aside: Path, contents: Contents, group: dist.ProcessGroup
) -> dict[str, FileRecord]:
    """Writes this rank's state, forces its files to storage and returns their records."""
    rank = group.rank()
    path = rank_file(aside, rank)
    path.parent.mkdir(exist_ok=True)
    write_rank_file(path, contents.rank_tree, contents.rank_tensors)
    own = [path, *sorted((aside / TENSORS).glob(f"__{rank}_*.distcp"))]
    if rank == 0:
        folder = aside / TENSORS
        # What Megatron's own loader looks for; this program never reads them.
        torch.save({}, folder / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        write_text(aside / STATE, contents.state_json)
        own += [folder / n for n in (".metadata", "common.pt", "metadata.json")] + [aside / STATE]
        for name, data in contents.companions.items():
            own.append(aside / COMPANIONS / name)
            own[-1].parent.mkdir(parents=True, exist_ok=True)
            own[-1].write_bytes(data)
    faults.reach("before_fsync", rank)
    for file in own:
        fsync(file)
    faults.reach("after_fsync", rank)
    return {str(file.relative_to(aside)): record_of(file) for file in own}


def _publish(
    root: Path, aside: Path, contents: Contents, files: dict[str, FileRecord], serial: int
) -> Path:
    """Rank 0: the manifest, then the name, then `latest`."""
    manifest = Manifest(
        step=contents.step, serial=serial, layouts=contents.layouts, versions=contents.versions,
        metrics=contents.metrics, files=files,
    )  # fmt: skip
    faults.reach("before_manifest", 0)
    for folder in (aside / TENSORS, aside / "ranks"):
        fsync(folder)
    manifest.write(aside)
    faults.reach("after_manifest", 0)
    final = step_folder(root, contents.step)
    faults.reach("before_rename", 0)
    put_in_place(aside, final)
    faults.reach("after_rename", 0)
    faults.reach("before_latest", 0)
    write_text(root / "latest", f"{final.name}\n")
    faults.reach("after_latest", 0)
    return final
