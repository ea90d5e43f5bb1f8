"""Layer: pure, one process. `verify` sees every difference, `inspect` shows what is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from megatron_rl.convert import names
from megatron_rl.convert.__main__ import main
from tests.convert.test_bad_input import change
from tests.convert.test_round_trip import convert
from tests.tiny_models import edit_config, write_tiny_reward_model

NORM = "model.layers.2.input_layernorm.weight"


def verify(capsys, source: Path, result: Path, *more: str) -> tuple[int, str]:
    """Exit code and the table's text, unwrapped."""
    capsys.readouterr()
    code = main(["verify", "--from", str(source), "--to", str(result), *more])
    shown = capsys.readouterr()
    return code, " ".join((shown.out + shown.err).replace("│", " ").split())


def test_a_faithful_conversion(tiny_model, tmp_path, capsys, family):
    convert("hf-to-megatron", tiny_model(family), tmp_path / "m")
    code, shown = verify(capsys, tiny_model(family), tmp_path / "m")
    assert code == 0, shown
    assert "weights, bit for bit equal" in shown and "logits of transformers equal" in shown
    assert "differs" not in shown and "not run" not in shown


def test_roles_dtypes_and_the_way_back(tiny_model_dir, tmp_path, capsys):
    reward = write_tiny_reward_model(tiny_model_dir, tmp_path / "reward")
    convert("hf-to-megatron", reward, tmp_path / "m")
    code, shown = verify(capsys, reward, tmp_path / "m")
    assert code == 0 and "logits of transformers equal" in shown
    convert("hf-to-megatron", tiny_model_dir, tmp_path / "c", "--role", "critic")
    code, shown = verify(capsys, tiny_model_dir, tmp_path / "c")
    assert code == 0 and "fresh value head" in shown
    convert("hf-to-megatron", tiny_model_dir, tmp_path / "b", "--dtype", "bf16")
    code, shown = verify(capsys, tiny_model_dir, tmp_path / "b", "--no-logits")
    assert code == 0 and "cast float32 → bfloat16" in shown and "logits" not in shown
    convert("megatron-to-hf", tmp_path / "b", tmp_path / "back")
    code, shown = verify(capsys, tmp_path / "b", tmp_path / "back")
    assert code == 0 and "checksums equal" in shown and "logits of transformers equal" in shown


DIFFERENCES = {
    "a weight": (
        lambda m, b: change(b, lambda t: t[NORM].view(-1)[5].add_(1e-6)), ["bit for bit", NORM],
    ),
    "a name": (
        lambda m, b: change(b, lambda t: t.update({"x": torch.zeros(1)})), ["strict load", "x"],
    ),
    "a setting": (lambda m, b: edit_config(b, rms_norm_eps=1e-3), ["architecture", "norm_eps"]),
    "the tokenizer": (
        lambda m, b: (b / "tokenizer.json").write_text("{}"), ["tokenizer.json"],
    ),
    "no tokenizer": (lambda m, b: (b / "tokenizer.json").unlink(), ["tokenizer.json is missing"]),
    "a bit on disk": (
        lambda m, b: flip(m / "huggingface" / "generation_config.json"), ["another checksum"],
    ),
}  # fmt: skip


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_are_named(tiny_model_dir, tmp_path, capsys, name):
    spoil, parts = DIFFERENCES[name]
    convert("hf-to-megatron", tiny_model_dir, tmp_path / "m")
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "back")
    spoil(tmp_path / "m", tmp_path / "back")
    code, shown = verify(capsys, tmp_path / "m", tmp_path / "back")
    assert code == 1 and "differs" in shown
    for part in parts:
        assert part.replace(" ", "") in shown.replace(" ", ""), shown


@pytest.mark.parametrize("rule", ["GateUp", "QueryKeyValue"])
def test_a_table_that_is_wrong_in_both_directions_is_seen(tiny_model_dir, tmp_path, capsys,
                                                          monkeypatch, rule):  # fmt: skip
    """Every bit comes back, yet the model computes something else."""
    kind = getattr(names, rule)
    shard, merge = kind.shard, kind.merge

    def swap(tensors: tuple) -> tuple:
        return (*tensors[:-2], tensors[-1], tensors[-2])

    def wrong_shard(self, source, arch, tp, rank):
        order = dict(zip(self.hf, swap(self.hf), strict=True))
        return shard(self, lambda name: source(order[name]), arch, tp, rank)

    def wrong_merge(self, shards, arch):
        found = merge(self, shards, arch)
        return dict(zip(self.hf, swap(tuple(found.values())), strict=True))

    monkeypatch.setattr(kind, "shard", wrong_shard)
    monkeypatch.setattr(kind, "merge", wrong_merge)
    convert("hf-to-megatron", tiny_model_dir, tmp_path / "m")
    code, shown = verify(capsys, tiny_model_dir, tmp_path / "m")
    assert code == 1
    assert "bit for bit equal" in shown and "logits of transformers differs" in shown


def inspect(capsys, folder: Path, *more: str) -> str:
    capsys.readouterr()
    assert main(["inspect", "--from", str(folder), *more]) == 0
    return capsys.readouterr().out


def test_inspect(tiny_model_dir, tmp_path, capsys):
    convert("hf-to-megatron", tiny_model_dir, tmp_path / "m", "--role", "critic")
    for folder, parts in (
        (tiny_model_dir, ["actor", "Hugging Face", "vocabulary logits", "tokenizer.json"]),
        (tmp_path / "m", ["critic", "Megatron", "one value", "weights only", "megatron-core"]),
    ):
        shown = inspect(capsys, folder)
        for part in [*parts, "llama", "4 layers", "hidden 64", "float32", "512 tokens"]:
            assert part in shown, shown


def test_inspect_as_settings_of_a_run(tiny_model_dir, tmp_path, capsys):
    from megatron_rl import Config
    from tests.trainer import run_case

    convert("hf-to-megatron", tiny_model_dir, tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "elsewhere")
    found = yaml.safe_load(inspect(capsys, tmp_path / "elsewhere", "--yaml"))
    assert found["model"] == {"actor": {"path": str(tmp_path / "elsewhere")}}
    values = run_case.settings("", tmp_path) | {"model": found["model"]}
    values["training"] |= found["training"]
    assert Config.from_dict(values).training.dtype == "fp32"
