"""Layer: gloo ranks. Damage, refusals, full disks, background saves: one error on all ranks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint import CheckpointError
from tests.checkpoint import resume_case as resume
from tests.engine import training_case as case

ADAM = dict(optimizer="adam", lr=1e-2, distributed_optimizer=True)


def refusal(action) -> str | None:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def damage_newest(rank, world, folder, model, how, on_corrupt):
    """Steps 1 to 3 saved, the newest damaged, then a fresh run resumes."""
    trainable = case.build(model, world, **ADAM)
    checkpoints = resume.manager(folder, {"actor": trainable}, keep_last=3)
    for step in (1, 2, 3):
        resume.train_step(trainable, 1)
        path = checkpoints.save(step)
    checkpoints.close()
    if rank == 0:
        _damage(path, how)
    torch.distributed.barrier()
    again = case.build(model, world, **ADAM)
    checkpoints = resume.manager(folder, {"actor": again}, on_corrupt=on_corrupt)
    error, step = None, None
    try:
        step = checkpoints.load()
    except CheckpointError as e:
        error = str(e)
    checkpoints.close()
    return error, step, again.schedule.num_steps, checkpoints.notes


def _damage(path: Path, how: str) -> None:
    file = sorted((path / "tensors").glob("*.distcp"))[-1]
    match how:
        case "truncated":
            with file.open("r+b") as stream:
                stream.truncate(file.stat().st_size - 7)
        case "bit":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 16
            file.write_bytes(data)
        case "missing":
            file.unlink()
        case "rank_file":
            (path / "ranks" / "rank_00001.safetensors").write_bytes(b"x")
        case "manifest":
            (path / "manifest.json").write_text("")


@pytest.mark.ranks
@pytest.mark.parametrize("how, says", [
    ("truncated", ".distcp has"), ("bit", "another checksum"), ("missing", ".distcp is missing"),
    ("rank_file", "rank_00001.safetensors"), ("manifest", "manifest.json is damaged"),
])  # fmt: skip
def test_damage_is_named_and_the_previous_checkpoint_used_when_asked(
    ranks, tiny_model, tmp_path, how, says
):
    model = str(tiny_model("llama"))
    for error, step, _, _ in ranks(2, damage_newest, tmp_path / "a", model, how, "fail"):
        assert step is None and says in error and "checkpoint.on_corrupt=previous" in error
    for error, step, taken, notes in ranks(
        2, damage_newest, tmp_path / "b", model, how, "previous"
    ):
        assert error is None and step == 2 and taken == 2
        assert says in notes[0] and "step_00000003.corrupt" in notes[0]


def refusals(rank, world, folder, model, tied):
    """What a checkpoint of another run says; nothing of this run is changed by it."""
    build = {**ADAM, "tp": 2}
    first = case.build(model, world, **build)
    checkpoints = resume.manager(folder, {"actor": first})
    resume.train_step(first, 1)
    checkpoints.save(1)
    found = {}
    others = {
        "architecture": ("actor", case.build(tied, world, **build)),
        "optimizer": ("actor", case.build(model, world, tp=2, optimizer="sgd")),
        "dtype": ("actor", case.build(model, world, dtype="bf16", **build)),
        "critic": ("critic", case.build(model, world, role="critic", **build)),
    }
    for what, (role, trainable) in others.items():
        before = resume.outcome(trainable, [])
        other = resume.manager(folder, {role: trainable})
        found[what] = refusal(other.load)
        after = resume.outcome(trainable, []) | {"random": before["random"]}
        resume.assert_same(before, after)
    other = resume.manager(folder, {"actor": first})
    other.add_state("kl", resume.Counter())
    found["state"] = refusal(other.load)
    found["notes"] = _notes(folder / "notes", first, others["critic"][1])
    found["nothing"] = resume.manager(folder / "empty", {"actor": first}).load()
    found["path"] = refusal(lambda: other.load(folder / "nowhere"))
    found["not_json"] = _refuses_tensors_in_states(folder, first)
    return found


def _notes(folder, actor, critic):
    """PPO, then GRPO with another learning rate, goes on from the actor."""
    before = {"training": {"actor": {"lr": 1e-5}, "steps": 3}, "seed": 1}
    roles = {"actor": actor, "critic": critic}
    resume.manager(folder, roles, config=before).save(1)
    now = {"training": {"actor": {"lr": 2e-5}, "steps": 3}, "seed": 1}
    later = resume.manager(folder, {"actor": actor}, config=now)
    later.load()
    return later.notes


def _refuses_tensors_in_states(folder, trainable):
    class Wrong(resume.Counter):
        def state_dict(self):
            return {"x": torch.zeros(1)}

    other = resume.manager(folder / "json", {"actor": trainable})
    other.add_state("wrong", Wrong())
    return refusal(lambda: other.save(1))


@pytest.mark.ranks
def test_a_checkpoint_of_another_run_is_refused_with_the_reason(ranks, tiny_model, tmp_path):
    models = str(tiny_model("llama")), str(tiny_model("llama_tied"))
    results = ranks(2, refusals, tmp_path, *models)
    assert results[0] == results[1], "the same error on all ranks"
    found = results[0]
    assert "{'tied': False}" in found["architecture"] and "{'tied': True}" in found["architecture"]
    assert "optimizer adam, this run has sgd" in found["optimizer"]
    assert "dtype float32, this run has bfloat16" in found["dtype"]
    assert "holds no critic" in found["critic"]
    assert "lacks the state kl" in found["state"]
    assert found["nothing"] is None
    assert any("also holds critic" in note for note in found["notes"])
    assert found["notes"][-1].endswith("saved: training.actor.lr: 1e-05 → 2e-05")
    assert "nowhere is not a checkpoint" in found["path"]
    assert "not JSON" in found["not_json"]


def full_disk(rank, world, folder, model):
    trainable = case.build(model, world, **ADAM)
    checkpoints = resume.manager(folder, {"actor": trainable}, keep_last=5)
    resume.train_step(trainable, 1)
    checkpoints.save(1)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    free = shutil.disk_usage(folder).free
    if rank == 0:  # leave a third of a checkpoint
        (folder / "ballast").write_bytes(b"\1" * (free - size // 3))
    torch.distributed.barrier()
    before_writing = refusal(lambda: checkpoints.save(2))
    from megatron_rl.checkpoint import manager

    check = manager.check_space
    manager.check_space = lambda *args: None  # as if another writer filled the disk meanwhile
    try:
        while_writing = refusal(lambda: checkpoints.save(2))
    finally:
        manager.check_space = check
    torch.distributed.barrier()
    names = sorted(p.name for p in folder.iterdir())
    torch.distributed.barrier()
    if rank == 0:
        (folder / "ballast").unlink()
    torch.distributed.barrier()
    checkpoints.save(2)
    return before_writing, while_writing, names, checkpoints.load()


@pytest.mark.ranks
def test_a_full_disk_leaves_the_earlier_checkpoint(ranks, tiny_model, small_disk):
    for before, during, names, step in ranks(2, full_disk, small_disk, str(tiny_model("llama"))):
        assert "needs" in before and "MiB free" in before and "checkpoint.dir" in before
        assert "No space left" in during or "writing" in during
        assert names == [".in_use.json", "ballast", "latest", "step_00000001"]
        assert step == 2


def unwritable(rank, world, folder, model):
    trainable = case.build(model, world, **ADAM)
    return refusal(lambda: resume.manager(folder, {"actor": trainable}))


@pytest.mark.ranks
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(ranks, tiny_model, small_disk):
    model = str(tiny_model("llama"))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for error in ranks(2, unwritable, small_disk / "run", model):
        assert "Read-only file system" in error and "checkpoint.dir" in error
    (small_disk.parent / "file").write_text("")
    for error in ranks(2, unwritable, small_disk.parent / "file" / "run", model):
        assert "can't be written" in error


class Late:
    """Does a background save's work as late as possible."""

    def __init__(self, work) -> None:
        self.finish = work


def background(rank, world, folder, model, late):
    """Training goes on while a save is written: the snapshot is that of the call."""
    from megatron_rl.checkpoint import manager

    original = manager.Background
    manager.Background = Late if late else original
    try:
        return _save_in_the_background(world, folder, model)
    finally:
        manager.Background = original


def _save_in_the_background(world, folder, model):
    trainable = case.build(model, world, **ADAM)
    checkpoints = resume.manager(folder, {"actor": trainable}, async_save=True)
    losses = [resume.train_step(trainable, 1) for _ in range(3)]
    checkpoints.save(3)
    losses += [resume.train_step(trainable, 1) for _ in range(2)]
    checkpoints.save(5)
    losses += [resume.train_step(trainable, 1)]
    checkpoints.close()
    whole = resume.outcome(trainable, losses)
    again = case.build(model, world, **ADAM)
    checkpoints = resume.manager(folder, {"actor": again}, async_save=True)
    step = checkpoints.load(folder / "step_00000003")
    resumed = resume.outcome(again, losses[:3] + [resume.train_step(again, 1) for _ in range(3)])
    newest = checkpoints.latest().name
    checkpoints.close()
    return step, newest, whole, resumed


@pytest.mark.ranks
@pytest.mark.parametrize("late", [False, True])
def test_a_background_save_holds_the_moment_of_the_call(ranks, tiny_model, tmp_path, late):
    for step, newest, whole, resumed in ranks(
        2, background, tmp_path, str(tiny_model("llama")), late
    ):
        assert (step, newest) == (3, "step_00000005")
        resume.assert_same(whole, resumed)


def background_error(rank, world, folder, model):
    trainable = case.build(model, world, **ADAM)
    checkpoints = resume.manager(folder, {"actor": trainable}, async_save=True)
    resume.train_step(trainable, 1)
    checkpoints.save(1)
    checkpoints.wait()
    torch.distributed.barrier()
    if rank == 0:
        record = folder / ".in_use.json"
        record.write_text(record.read_text().replace('"run": "', '"run": "other'))
    torch.distributed.barrier()
    checkpoints.save(2)
    return refusal(checkpoints.wait)


@pytest.mark.ranks
def test_an_error_of_a_background_save_is_not_lost(ranks, tiny_model, tmp_path):
    for error in ranks(2, background_error, tmp_path, str(tiny_model("llama"))):
        assert "taken over by another run" in error
