"""Layer: pure and one gloo rank. Nothing that is planted in a model folder ever runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_rl.convert.__main__ import main
from tests.convert.test_round_trip import convert
from tests.planted_code import PLACES, Plant, plant_in_checkpoint
from tests.tiny_models import write_tiny_reward_model
from tests.trainer import run_case


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", ["megatron-to-hf", "inspect", "verify"])
def test_convert_and_inspect(tiny_model_dir, tmp_path, marker, capsys, place, command):
    convert("hf-to-megatron", tiny_model_dir, tmp_path / "m")
    plant_in_checkpoint(tmp_path / "m", place, marker)
    capsys.readouterr()
    arguments = {
        "megatron-to-hf": ["--from", str(tmp_path / "m"), "--to", str(tmp_path / "out")],
        "inspect": ["--from", str(tmp_path / "m")],
        "verify": ["--from", str(tiny_model_dir), "--to", str(tmp_path / "m"), "--no-logits"],
    }[command]
    code = main([command, *arguments])
    reads_it = {"common.pt": [], "a tensor's bytes": ["megatron-to-hf", "verify"]}
    if command in reads_it.get(place, [command]):
        shown = capsys.readouterr()
        assert code in (1, 2), shown
        assert "code" in shown.err + shown.out or "missing" in shown.err + shown.out
        assert not (tmp_path / "out").exists()
    else:
        assert code == 0


@pytest.mark.ranks
@pytest.mark.parametrize("place", PLACES)
def test_a_reward_model(ranks, tiny_model_dir, tmp_path, marker, place):
    source = write_tiny_reward_model(tiny_model_dir, tmp_path / "source")
    convert("hf-to-megatron", source, tmp_path / "m")
    plant_in_checkpoint(tmp_path / "m", place, marker)
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, model__reward={"path": str(tmp_path / "m")}, reward={}
    )
    (message,) = ranks(1, refusal, values)
    assert (message is None) == (place == "common.pt"), message
    if message is not None:
        assert "code" in message or "missing" in message, message


def refusal(rank, world, values):
    from megatron_rl import Config, Trainer

    try:
        Trainer(Config.from_dict(values)).close()
    except ValueError as error:
        return str(error)
    return None


def to_bin(source: Path, folder: Path, *, files: int) -> Path:
    """The folder's weights as `pytorch_model*.bin`."""
    from safetensors.torch import load_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for i in range(files):
        name = f"pytorch_model-{i + 1:05d}-of-{files:05d}.bin"
        part = dict(list(tensors.items())[i::files])
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def test_weights_in_bin_files(tiny_model_dir, tmp_path, marker, capsys):
    """They convert like safetensors; one with code is refused."""
    from tests.convert.test_round_trip import assert_same_weights, weights

    for files in (1, 3):
        source = to_bin(tiny_model_dir, tmp_path / f"bin{files}", files=files)
        convert("hf-to-megatron", source, tmp_path / f"m{files}")
        convert("megatron-to-hf", tmp_path / f"m{files}", tmp_path / f"back{files}")
        assert_same_weights(weights(tmp_path / f"back{files}"), weights(tiny_model_dir))
    state = torch.load(tmp_path / "bin1" / "pytorch_model.bin", weights_only=True)
    old = tmp_path / "bin1" / "pytorch_model.bin"
    torch.save(state, old, _use_new_zipfile_serialization=False)
    convert("hf-to-megatron", tmp_path / "bin1", tmp_path / "old")
    torch.save({**state, "extra": Plant(marker)}, old)
    arguments = ["hf-to-megatron", "--from", str(tmp_path / "bin1"), "--to", str(tmp_path / "x")]
    assert main(arguments) == 2
    assert "was made to run code" in capsys.readouterr().err
    old.write_bytes(old.read_bytes()[:5000])
    assert main(arguments) == 2
    assert "cut short or damaged" in capsys.readouterr().err
