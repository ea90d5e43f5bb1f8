"""Layer: pure, and one gloo rank. No file of a checkpoint can run code.

Every planted pickle would create a marker file if it were executed.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from megatron_rl.checkpoint import CheckpointError
from megatron_rl.checkpoint.folder import Manifest, record_of
from megatron_rl.checkpoint.safe_loading import (
    UnsafeCheckpointError,
    read_index,
    read_tensors,
    safe_torch_load,
)
from tests.checkpoint import resume_case as resume
from tests.engine import training_case as case


class Plant:
    """Pickles to a call that creates `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def plain_checkpoint(folder: Path, state: dict) -> Path:
    torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "executed"
    yield path
    assert not path.exists(), "a planted pickle was executed"


def test_the_plant_works(tmp_path):
    """Otherwise the other tests would prove nothing."""
    marker = tmp_path / "executed"
    pickle.loads(pickle.dumps(Plant(marker)))
    assert marker.exists()


def test_an_index_with_a_plant_is_refused(tmp_path, marker):
    folder = plain_checkpoint(tmp_path / "c", {"x": torch.arange(3)})
    (folder / ".metadata").write_bytes(pickle.dumps(Plant(marker)))
    with pytest.raises(UnsafeCheckpointError, match="pathlib|getattr"):
        read_index(folder)


def test_a_plant_inside_a_real_index_is_refused(tmp_path, marker):
    folder = plain_checkpoint(tmp_path / "c", {"x": torch.arange(3)})
    index = read_index(folder)
    index.planner_data = {"harmless": Plant(marker)}
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UnsafeCheckpointError):
        read_index(folder)


@pytest.mark.parametrize("module, name", [
    ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load"),
    ("torch.distributed.checkpoint.filesystem", "pickle.loads"), ("torch", "hub.load"),
    ("torch.distributed.checkpoint.metadata", "os.system"), ("pathlib", "Path.touch"),
])  # fmt: skip
def test_names_outside_the_list_are_refused(tmp_path, module, name):
    """Protocol 4 names may hold dots, which reach through modules."""
    code = pickle.PROTO + b"\x04" + _text(module) + _text(name) + pickle.STACK_GLOBAL + b"."
    (tmp_path / ".metadata").write_bytes(code)
    with pytest.raises(UnsafeCheckpointError, match="which no checkpoint index contains"):
        read_index(tmp_path)


def _text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def test_an_index_of_torch_is_read_in_full(tmp_path):
    state = {"a": torch.randn(3, 4, dtype=torch.bfloat16), "b": torch.arange(5), "c": {"d": 1}}
    folder = plain_checkpoint(tmp_path / "c", state)
    with (folder / ".metadata").open("rb") as stream:
        want = pickle.load(stream)
    got = read_index(folder)
    assert got.state_dict_metadata == want.state_dict_metadata
    assert got.storage_data == want.storage_data
    target = {"a": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(5, dtype=torch.long)}
    read_tensors(folder, target)
    assert torch.equal(target["a"], state["a"]) and torch.equal(target["b"], state["b"])


def test_a_byte_item_with_a_plant_is_refused(tmp_path, marker):
    folder = plain_checkpoint(tmp_path / "c", {"x": torch.arange(3), "bytes": Plant(marker)})
    with pytest.raises(UnsafeCheckpointError, match="byte item bytes"):
        read_tensors(folder, {"x": torch.zeros(3, dtype=torch.long), "bytes": io.BytesIO()})


def test_a_plain_byte_item_is_read(tmp_path):
    folder = plain_checkpoint(tmp_path / "c", {"bytes": "plain text"})
    target = {"bytes": io.BytesIO()}
    read_tensors(folder, target)
    assert target["bytes"] == "plain text"


def test_common_pt(tmp_path, marker):
    torch.save({"args": argparse.Namespace(num_layers=2), "iteration": 7}, tmp_path / "common.pt")
    assert safe_torch_load(tmp_path / "common.pt")["args"].num_layers == 2
    torch.save({"args": Plant(marker)}, tmp_path / "common.pt")
    with pytest.raises(UnsafeCheckpointError, match="common.pt is not plain data .*getattr"):
        safe_torch_load(tmp_path / "common.pt")


def test_files_outside_the_folder_are_refused(tmp_path):
    folder = plain_checkpoint(tmp_path / "c", {"x": torch.arange(3)})
    index = read_index(folder)
    for info in index.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UnsafeCheckpointError, match="outside"):
        read_tensors(folder, {"x": torch.zeros(3, dtype=torch.long)})


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    folder = plain_checkpoint(tmp_path / "c", {"x": torch.arange(3)})
    with pytest.raises(ValueError, match="lacks 1 tensors .* y"):
        read_tensors(folder, {"y": torch.zeros(3)})
    with pytest.raises(ValueError, match="x"):
        read_tensors(folder, {"x": torch.zeros(4, dtype=torch.long)})
    with pytest.raises(ValueError, match="is missing"):
        read_index(tmp_path)


def planted_resume(rank, world, folder, model, marker, place):
    """A checkpoint whose author plants a pickle and makes the manifest fit it."""
    trainable = case.build(model, world, optimizer="adam")
    checkpoints = resume.manager(folder, {"actor": trainable})
    resume.train_step(trainable, 2)
    path = checkpoints.save(1)
    _plant(path / "tensors", place, marker)
    manifest = Manifest.read(path)
    for name in manifest.files:
        manifest.files[name] = record_of(path / name)
    manifest.write(path)
    try:
        checkpoints.load()
    except CheckpointError as error:
        return str(error)
    return None


def _plant(tensors: Path, place: str, marker: Path) -> None:
    if place == ".metadata":
        index = read_index(tensors)
        index.planner_data = Plant(marker)
        (tensors / place).write_bytes(pickle.dumps(index))
    elif place == "common.pt":
        torch.save(Plant(marker), tensors / place)
    else:
        index = read_index(tensors)
        name, info = next((k, v) for k, v in index.storage_data.items() if "weight" in k.fqn)
        file = tensors / info.relative_path
        with file.open("ab") as stream:
            info.offset = stream.tell()
            torch.save(Plant(marker), stream)
            info.length = stream.tell() - info.offset
        (tensors / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.ranks
@pytest.mark.parametrize("place", [".metadata", "common.pt", "a tensor's bytes"])
def test_resume_never_runs_a_plant(ranks, tiny_model, tmp_path, marker, place):
    args = (tmp_path / "run", str(tiny_model("llama")), marker, place)
    (error,) = ranks(1, planted_resume, *args)
    if place == "common.pt":  # only Megatron's own tools read it
        assert error is None
    else:
        assert error is not None


def test_the_rank_file_format_holds_no_code(tmp_path):
    """safetensors and JSON: there is nothing to execute."""
    from megatron_rl.checkpoint.rank_files import read_rank_file, snapshot, write_rank_file

    tensors: dict = {}
    state = {"a": torch.arange(3), "b": [1, {"c": torch.tensor(2.5)}], "d": None, "e": "text"}
    tree = snapshot(state, tensors)
    state["a"].zero_()
    write_rank_file(tmp_path / "r.safetensors", tree, tensors)
    got = read_rank_file(tmp_path / "r.safetensors")
    assert got["a"].tolist() == [0, 1, 2] and got["b"][1]["c"] == 2.5
    assert (got["d"], got["e"]) == (None, "text")
    with pytest.raises(ValueError, match="/f is a set"):
        snapshot({"f": {1}}, {})
    with pytest.raises(ValueError, match="keys must be text"):
        snapshot({"f": {1: 2}}, {})
    json.dumps(tree)
