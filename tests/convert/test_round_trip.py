"""Layer: pure. Hugging Face → Megatron → Hugging Face gives back every bit, for every family."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_rl.convert.__main__ import main


def convert(command: str, source: Path, target: Path, *more: str) -> None:
    assert main([command, "--from", str(source), "--to", str(target), *more]) == 0


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def assert_same_weights(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def there_and_back(source: Path, folder: Path, *more: str) -> Path:
    convert("hf-to-megatron", source, folder / "megatron", *more)
    convert("megatron-to-hf", folder / "megatron", folder / "back", *more)
    return folder / "back"


def test_every_bit_comes_back(tiny_model, tmp_path, family):
    source = tiny_model(family)
    back = there_and_back(source, tmp_path, "--max-shard-size", "60KB")
    assert_same_weights(weights(back), weights(source))
    files = sorted(p.name for p in back.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((back / f).stat().st_size < 80_000 or len(load_file(back / f)) == 1 for f in files)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    old, new = (json.loads((f / "config.json").read_text()) for f in (source, back))
    assert new == old
