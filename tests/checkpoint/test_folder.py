"""Layer: pure. Which checkpoint is newest, which are kept, what counts as damaged."""

from __future__ import annotations

import json

import pytest

from megatron_rl.checkpoint import folder as files
from megatron_rl.checkpoint.folder import CheckpointError, FileRecord, Manifest


def make(root, step, serial, **metrics):
    path = files.step_folder(root, step)
    path.mkdir()
    (path / "data").write_bytes(bytes([step % 256]) * 1000)
    Manifest(
        step=step, serial=serial, layouts={}, versions={}, metrics=metrics,
        files={"data": files.record_of(path / "data")},
    ).write(path)  # fmt: skip
    return path


def names(root):
    return [path.name for path, _ in files.checkpoints(root)]


def test_newest_is_the_last_written_not_the_highest_step(tmp_path):
    """After going back to step 2 and saving step 3, the abandoned step 9 is not the newest."""
    make(tmp_path, 9, 1)
    make(tmp_path, 2, 2)
    make(tmp_path, 3, 3)
    assert names(tmp_path) == ["step_00000003", "step_00000002", "step_00000009"]
    assert files.next_serial(tmp_path) == 4


def test_a_damaged_manifest_keeps_its_place(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step, step)
    (tmp_path / "step_00000002" / "manifest.json").write_text("{")
    assert names(tmp_path) == ["step_00000003", "step_00000002", "step_00000001"]
    (tmp_path / "step_00000003" / "manifest.json").unlink()
    assert names(tmp_path)[0] == "step_00000003"


def test_a_folder_in_the_making_is_not_a_checkpoint(tmp_path):
    files.partial_folder(tmp_path, 5).mkdir()
    make(tmp_path, 4, 1)
    assert names(tmp_path) == ["step_00000004"]
    files.remove_leftovers(tmp_path)
    assert not files.partial_folder(tmp_path, 5).exists()


def test_a_replaced_checkpoint_comes_back_if_its_successor_did_not(tmp_path):
    path = make(tmp_path, 4, 1)
    path.rename(tmp_path / ".step_00000004.old")
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step_00000004"]


def test_a_new_folder_replaces_one_of_the_same_step(tmp_path):
    make(tmp_path, 4, 1)
    aside = files.partial_folder(tmp_path, 4)
    aside.mkdir()
    Manifest(step=4, serial=2, layouts={}, versions={}, metrics={}).write(aside)
    files.put_in_place(aside, files.step_folder(tmp_path, 4))
    assert files.checkpoints(tmp_path) == [(files.step_folder(tmp_path, 4), 2)]
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]


@pytest.mark.parametrize(
    "rules, kept",
    [
        (dict(keep_last=2, keep_every=None, best_metric=None), [6, 5]),
        (dict(keep_last=1, keep_every=2, best_metric=None), [6, 4, 2]),
        (dict(keep_last=1, keep_every=None, best_metric="reward"), [6, 3]),
        (dict(keep_last=1, keep_every=5, best_metric="absent"), [6, 5]),
    ],
)
def test_what_is_kept(tmp_path, rules, kept):
    for step, reward in zip(range(1, 7), (0.1, 0.2, 0.9, 0.3, 0.9 - 1e-9, 0.0), strict=True):
        make(tmp_path, step, step, reward=reward)
    files.prune(tmp_path, **rules)
    assert names(tmp_path) == [f"step_{step:08d}" for step in kept]
    assert len(list(tmp_path.iterdir())) == len(kept), "nothing half-removed is left"


def test_damage_names_the_file(tmp_path):
    path = make(tmp_path, 1, 1)
    record = Manifest.read(path).files["data"]
    assert files.damage(path, "data", record) is None
    data = bytearray((path / "data").read_bytes())
    data[500] ^= 1
    (path / "data").write_bytes(data)
    assert str(path / "data") in files.damage(path, "data", record)
    assert "checksum" in files.damage(path, "data", record)
    (path / "data").write_bytes(data[:-1])
    assert "999 bytes instead of 1000" in files.damage(path, "data", record)
    (path / "data").unlink()
    assert "missing" in files.damage(path, "data", record)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"version": 99}, "format 99"),
        ({"files": None}, "damaged"),
        ({"files": {"a": {"size": 1}}}, "damaged"),
        ({"unknown": 1}, "damaged"),
    ],
)
def test_a_manifest_that_cannot_be_used_says_why(tmp_path, change, says):
    path = make(tmp_path, 1, 1)
    record = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(record | change))
    with pytest.raises(CheckpointError, match=says):
        Manifest.read(path)


def test_another_folder_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        Manifest.read(tmp_path)


def test_set_aside_never_overwrites(tmp_path):
    first = files.set_aside(make(tmp_path, 1, 1))
    second = files.set_aside(make(tmp_path, 1, 2))
    assert {first.name, second.name} == {"step_00000001.corrupt", "step_00000001.corrupt2"}
    assert names(tmp_path) == []


def test_record_of_is_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.record_of(tmp_path / "x") == FileRecord(size=3, sha256=digest)
