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
from megatron_rl.checkpoint.safe_loading import (
    UnsafeCheckpointError,
    read_index,
    read_tensors,
    safe_torch_load,
)
from tests.checkpoint import resume_case as resume
from tests.engine import training_case as case
from tests.planted_code import PLACES, Plant, name_as_pickle, plant_in_checkpoint


def plain_checkpoint(folder: Path, state: dict) -> Path:
    torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


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
    (tmp_path / ".metadata").write_bytes(name_as_pickle(module, name))
    with pytest.raises(UnsafeCheckpointError, match="which no checkpoint index contains"):
        read_index(tmp_path)


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
    plant_in_checkpoint(path, place, marker)
    try:
        checkpoints.load()
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.ranks
@pytest.mark.parametrize("place", PLACES)
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
