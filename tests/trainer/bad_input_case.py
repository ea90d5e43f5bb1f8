"""Inputs that a run must refuse, written to disk, and the command line run on them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import train_ppo
from tests.tiny_models import edit_config, write_byte_tokenizer, write_tiny_model


def write(folder: Path, values: dict) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def outcome(monkeypatch, capsys, config: str, *overrides: str, world: int = 1):
    """Exit code and standard error of the command line, run in this process."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", str(world)), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", "--config", config, *overrides])
    before = dist.is_initialized()
    capsys.readouterr()
    code = train_ppo.main()
    assert dist.is_initialized() == before, "a process group was created"
    return code, capsys.readouterr().err


def copy_model(source: Path, folder: Path, **changes) -> str:
    target = folder / "model"
    shutil.copytree(source, target)
    edit_config(target, **changes)
    return str(target)


def bad_line(folder: Path) -> str:
    path = folder / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": \n')
    return str(path)


def text(folder: Path, content: str, name: str = "other.jsonl") -> str:
    path = folder / name
    path.write_text(content)
    return str(path)


def larger_tokenizer(folder: Path) -> str:
    target = folder / "tokenizer"
    write_byte_tokenizer(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(target)
    return str(target)


def cut_weights(source: Path, folder: Path) -> str:
    target = Path(copy_model(source, folder))
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return str(target)


def sharded(source: Path, folder: Path, index: str) -> str:
    """The model with an index; `{{}}` in it stands for the table of its tensors."""
    target = Path(copy_model(source, folder))
    names = safe_open(target / "model.safetensors", framework="pt").keys()
    (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
    table = {name: f"model-0000{1 + (i > 5)}-of-00002.safetensors" for i, name in enumerate(names)}
    text = index.replace("{{}}", json.dumps(table))
    (target / "model.safetensors.index.json").write_text(text)
    return str(target)


def other_weights(source: Path, folder: Path, drop: str = "", **changes: Any) -> str:
    """The model with tensors added, replaced or dropped."""
    target = Path(copy_model(source, folder))
    tensors = load_file(target / "model.safetensors") | changes
    tensors.pop(drop, None)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


class RunsWhenRead:
    def __reduce__(self):
        return print, ("this code must not run",)


def pickled(source: Path, folder: Path) -> str:
    target = Path(copy_model(source, folder))
    (target / "model.safetensors").unlink()
    torch.save({"model.norm.weight": RunsWhenRead()}, target / "pytorch_model.bin")
    return str(target)


def larger_than_the_disk(folder: Path) -> str:
    """A tied model whose sparse weights need little room, but whose checkpoint needs too much."""
    target = folder / "model"
    write_tiny_model("llama_tied", target)
    vocab = int(shutil.disk_usage(folder).free / 12 / 64 * 1.2)
    weights = target / "model.safetensors"
    stored = weights.read_bytes()
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
    offset = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if "embed" in name:
            entry["shape"][0] = vocab
        entry["dtype"], size = "BF16", 2
        for length in entry["shape"]:
            size *= length
        entry["data_offsets"] = [offset, offset + size]
        offset += size
    text = json.dumps(header).encode()
    with weights.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    edit_config(target, vocab_size=vocab)
    return str(target)


def broken_tokenizer(folder: Path) -> str:
    target = folder / "tokenizer"
    write_byte_tokenizer(target)
    (target / "tokenizer.json").write_text('{"version"')
    return str(target)
