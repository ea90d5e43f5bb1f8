"""Layer: pure. Wrong folders are refused in one sentence, with exit code 2 and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert.__main__ import main
from tests.convert.test_round_trip import assert_same_weights, convert, weights
from tests.planted_code import renew_manifest
from tests.tiny_models import edit_config, write_tiny_reward_model

Case = tuple[Callable[[Path], object], list[str]]


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edits the tensors of a folder's only file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def index_without_file(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )


def index_outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../model.safetensors"}})
    )


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


NORM = "model.layers.2.input_layernorm.weight"
HUGGING_FACE: dict[str, Case] = {
    "no folder": (shutil.rmtree, ["no such folder"]),
    "no config": (
        lambda f: (f / "config.json").unlink(),
        ["no model folder", "no config.json", "no manifest.json"],
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no model.safetensors"]),
    "missing shard": (index_without_file, ["missing", "model-00001-of-00002.safetensors"]),
    "shard outside": (index_outside, ["'../model.safetensors'", "outside"]),
    "index no JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"), ["is not an index"],
    ),
    "truncated": (cut_short, ["model.safetensors can't be used", "cut short"]),
    "unexpected tensor": (
        lambda f: change(f, lambda t: t.update({"model.extra": torch.zeros(2)})),
        ["missing none", "unexpected model.extra"],
    ),
    "many unexpected": (
        lambda f: change(f, lambda t: t.update({f"x.{i}": torch.zeros(1) for i in range(12)})),
        ["unexpected x.0, x.1, x.10", "and 4 more"],
    ),
    "missing tensor": (
        lambda f: change(f, lambda t: t.pop(NORM)), [f"missing {NORM}", "unexpected none"],
    ),
    "wrong shape": (
        lambda f: change(f, lambda t: t.update({NORM: torch.zeros(63)})),
        [NORM, "(63,)", "expected (64,)"],
    ),
    "unknown architecture": (
        lambda f: edit_config(f, model_type="bert"), ["'bert'", "known families: llama"],
    ),
    "no reward head": (lambda f: None, ["missing score.weight", "rewards.fit"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_wrong_hugging_face_folder(tiny_model_dir, tmp_path, capsys, name):
    spoil, parts = HUGGING_FACE[name]
    source = shutil.copytree(tiny_model_dir, tmp_path / "in" / "model")
    spoil(source)
    role = ["--role", "reward"] if "head" in name else []
    refused(capsys, ["hf-to-megatron", "--from", str(source), *role], tmp_path, parts)


def refused(capsys, command: list[str], tmp_path: Path, parts: list[str]) -> None:
    """One line on standard error with the parts, exit code 2, and nothing made."""
    assert main([*command, "--to", str(tmp_path / "out" / "result")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    for part in parts:
        assert part in message, message
    assert not (tmp_path / "out").exists()


def test_two_labels(tiny_model_dir, tmp_path, capsys):
    source = write_tiny_reward_model(tiny_model_dir, tmp_path / "in")
    change(source, lambda t: t.update({"score.weight": torch.zeros(2, 64)}))
    command = ["hf-to-megatron", "--from", str(source)]
    capsys.readouterr()
    refused(capsys, command, tmp_path, ["the shape (2, 64)", "(1, 64)", "num_labels=1"])


def cut_tensors(folder: Path) -> None:
    path = folder / "tensors" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])


def other_architecture(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"ffn": 96', '"ffn": 128'))
    renew_manifest(folder)


MEGATRON: dict[str, Case] = {
    "truncated": (cut_tensors, ["__0_0.distcp", "bytes instead of", "damaged"]),
    "file missing": (
        lambda f: (f / "tensors" / "__0_0.distcp").unlink(), ["__0_0.distcp (missing)"],
    ),
    "no index": (lambda f: (f / "tensors" / ".metadata").unlink(), [".metadata is missing"]),
    "state no JSON": (lambda f: (f / "state.json").write_text("{"), ["state.json can't be read"]),
    "shape": (other_architecture, ["mlp.linear_fc1.weight", "(192, 64)", "(128, 64)"]),
    "manifest": (lambda f: (f / "manifest.json").write_text("[]"), ["manifest.json is damaged"]),
    "role": (lambda f: None, ["has no reward", "actor (lm head)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MEGATRON)
def test_a_wrong_megatron_folder(tiny_model_dir, tmp_path, capsys, name):
    spoil, parts = MEGATRON[name]
    convert("hf-to-megatron", tiny_model_dir, tmp_path / "in")
    capsys.readouterr()
    spoil(tmp_path / "in")
    role = ["--role", "reward"] if name == "role" else []
    command = ["megatron-to-hf", "--from", str(tmp_path / "in"), *role]
    refused(capsys, command, tmp_path, parts)


def test_the_other_kind_of_folder(tiny_model_dir, tmp_path, capsys):
    command = ["megatron-to-hf", "--from", str(tiny_model_dir)]
    refused(capsys, command, tmp_path, ["is a Hugging Face folder", "hf-to-"])


@pytest.mark.parametrize("size", ["5XB", "-1GB", "GB", "0"])
def test_sizes(tmp_path, capsys, size):
    with pytest.raises(SystemExit) as stop:
        main(["hf-to-megatron", "--from", "a", "--to", "b", f"--max-shard-size={size}"])
    assert stop.value.code == 2 and "write 5GB" in capsys.readouterr().err


@pytest.mark.parametrize("small_disk", [1], indirect=True)
def test_too_full_a_disk_is_seen_before_anything_is_written(tiny_model_dir, small_disk, capsys):
    target = small_disk / "result"
    assert main(["hf-to-megatron", "--from", str(tiny_model_dir), "--to", str(target)]) == 2
    message = capsys.readouterr().err
    assert "GiB are needed" in message and "GiB free" in message
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("small_disk", [1], indirect=True)
@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf"])
def test_a_disk_that_fills_up_meanwhile(tiny_model_dir, tmp_path, small_disk, capsys, monkeypatch,
                                        command):  # fmt: skip
    from megatron_rl.convert import staging

    source = tiny_model_dir
    if command == "megatron-to-hf":
        convert("hf-to-megatron", source, tmp_path / "m")
        source = tmp_path / "m"
    # As if another program filled the disk after the check.
    monkeypatch.setattr(staging, "_check_space", lambda *args: None)
    (small_disk / "ballast").write_bytes(b"\1" * 500_000)
    arguments = [command, "--from", str(source), "--to", str(small_disk / "result"),
                 "--max-shard-size", "100KB"]  # fmt: skip
    assert main(arguments) == 2
    assert "is full" in capsys.readouterr().err
    assert not (small_disk / "result").exists()
    (small_disk / "ballast").unlink()
    assert main(arguments) == 0
    assert "from an earlier run" in capsys.readouterr().out
    if command == "megatron-to-hf":
        assert_same_weights(weights(small_disk / "result"), weights(tiny_model_dir))
