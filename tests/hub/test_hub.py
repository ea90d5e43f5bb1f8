"""Layer: pure, against a real HTTP server. A hub id is what a folder is, or one clear sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from megatron_rl.config import ConfigError
from megatron_rl.hub import Named, is_data_id, is_hub_id, model_folder, prompt_file, tokenizer_place
from megatron_rl.once_per_node import NodeRank
from tests.hub.hub_server import Hub, Repository

ALONE = NodeRank()
MODEL = {
    "config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"t",
    "modeling_own.py": b"code", "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"c",
    "onnx/model.safetensors": b"o",
}  # fmt: skip


def named(name: str, revision: str | None = None, setting: str = "model.actor.path") -> Named:
    section = setting.rpartition(".")[0]
    return Named(
        name=name, revision=revision, setting=setting, revision_setting=f"{section}.revision"
    )


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_model_is_fetched_without_what_no_run_reads(hub: Hub) -> None:
    hub.repositories["models/org/model"] = Repository(branches={"main": MODEL})
    folder = model_folder(named("org/model"), ALONE)
    assert files_in(folder) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert model_folder(named("org/model"), ALONE) == folder
    assert set(hub.served.values()) == {1}, "the cache is used"


def test_code_is_fetched_only_when_it_may_run(hub: Hub) -> None:
    hub.repositories["models/org/model"] = Repository(branches={"main": MODEL})
    folder = model_folder(named("org/model"), ALONE, trust_remote_code=True)
    assert "modeling_own.py" in files_in(folder)
    assert hub.served["pytorch_model.bin"] == 0


def test_tokenizer_comes_without_weights(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["models/org/model"] = Repository(branches={"main": MODEL})
    folder = tokenizer_place(named("org/model", setting="model.tokenizer.path"), ALONE)
    assert files_in(folder) == {"config.json", "tokenizer.json"}
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"pieces")
    assert tokenizer_place(named(str(file), setting="model.tokenizer.path"), ALONE) == file


def test_torch_files_are_fetched_where_there_are_no_others(hub: Hub) -> None:
    files = {name: text for name, text in MODEL.items() if not name.endswith(".safetensors")}
    hub.repositories["models/org/model"] = Repository(branches={"main": files})
    assert "pytorch_model.bin" in files_in(model_folder(named("org/model"), ALONE))


def test_revision_names_the_files(hub: Hub) -> None:
    branches = {"main": {"config.json": b"1"}, "v2": {"config.json": b"2"}}
    repository = hub.repositories["models/org/model"] = Repository(branches=branches)
    read = [
        (model_folder(named("org/model", revision), ALONE) / "config.json").read_bytes()
        for revision in (None, "v2", repository.commit("v2")[0])
    ]
    assert read == [b"1", b"2", b"2"]


def test_private_repository_needs_the_token(hub: Hub, monkeypatch) -> None:
    hub.repositories["models/org/model"] = Repository(branches={"main": MODEL}, token="secret")
    with pytest.raises(ConfigError, match="nor a repository 'org/model'.*HF_TOKEN if it is priv"):
        model_folder(named("org/model"), ALONE)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert model_folder(named("org/model"), ALONE).is_dir()


REFUSED = {
    "no_repository": ("org/none", None, ["neither such a path here nor", "check the name"]),
    "no_revision": ("org/model", "v9", ["model.actor.revision is 'v9'", "no such revision"]),
    "gated": ("org/gated", None, ["org/gated is gated", "accept its terms", "HF_TOKEN"]),
    "not_an_id": ("models/my/sft", None, ["no such folder", "or a hub id (owner/name)"]),
    "bare_name": ("my-model", None, ["no such folder", "or a hub id (owner/name)"]),
    "wrong_characters": ("org/mod el", None, ["no such folder"]),
    "rejected_name": ("org/mod--el", None, ["'org/mod--el'", "could not be asked"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fetched_is_one_sentence(hub: Hub, case: str) -> None:
    hub.repositories["models/org/model"] = Repository(branches={"main": MODEL})
    hub.repositories["models/org/gated"] = Repository(branches={"main": MODEL}, gated=True)
    name, revision, parts = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        model_folder(named(name, revision), ALONE)
    message = str(refusal.value)
    assert "\n" not in message and len(message) < 400, message
    for part in parts:
        assert part in message, message
    assert not hub.served


def test_offline_uses_the_cache_or_says_what_is_missing(hub: Hub, monkeypatch) -> None:
    branches = {"main": MODEL, "v2": {"config.json": b"2"}}
    hub.repositories["models/org/model"] = Repository(branches=branches)
    folder = model_folder(named("org/model"), ALONE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder(named("org/model"), ALONE) == folder
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set while revision v2 is not whole"):
        model_folder(named("org/model", "v2"), ALONE)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="revision main is not whole in the cache"):
        model_folder(named("org/model"), ALONE)


def test_network_down_uses_the_cache_or_says_so(hub: Hub, monkeypatch) -> None:
    hub.repositories["models/org/model"] = Repository(branches={"main": MODEL})
    folder = model_folder(named("org/model"), ALONE)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert model_folder(named("org/model"), ALONE) == folder
    shutil.rmtree(constants.HF_HUB_CACHE)
    with pytest.raises(ConfigError, match="could not be asked .*refused.*; check the network"):
        model_folder(named("org/model"), ALONE)


def test_what_exists_on_disk_is_no_hub_id(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("org/model") and is_hub_id("org/other")
    assert not is_data_id("data/train.jsonl") and is_data_id("org/set/train.jsonl")
    assert model_folder(named("org/model"), ALONE) == Path("org/model")
    with pytest.raises(ConfigError, match="model.actor.revision is 'v1'.*only hub ids have rev"):
        model_folder(named("org/model", "v1"), ALONE)


DATA = {
    "of_the_split": (["train.jsonl", "test.jsonl"], "org/set", "train", "train.jsonl"),
    "of_the_other_split": (["train.jsonl", "test.jsonl"], "org/set", "eval", "test.jsonl"),
    "in_a_folder": (["data/train-0.jsonl", "README.md"], "org/set", "train", "data/train-0.jsonl"),
    "the_only_one": (["sums.jsonl"], "org/set", "train", "sums.jsonl"),
    "named": (["a.jsonl", "b/c.jsonl"], "org/set/b/c.jsonl", "train", "b/c.jsonl"),
    "unclear": (["a.jsonl", "b.jsonl"], "org/set", "train", "not clear (a.jsonl, b.jsonl); name"),
    "no_held_out": (["train.jsonl"], "org/set", "eval", "not clear (train.jsonl)"),
    "parquet": (["d/train-0.parquet", "x.csv"], "org/set", "train", "d/train-0.parquet"),
    "lines_first": (["train.jsonl", "train.parquet"], "org/set", "train", "train.jsonl"),
    "split_first": (["more.jsonl", "train.parquet"], "org/set", "train", "train.parquet"),
    "in_pieces": (["train-0.parquet", "trainer.parquet"], "org/set", "train", "not clear (train-0"),
    "neither": (["train.csv"], "org/set", "train", "has no JSONL or Parquet file; prompts are re"),
    "missing": (["a.jsonl"], "org/set/b.jsonl", "train", "has no file 'b.jsonl'"),
}


PIECES = {
    "of_the_split": (
        ["d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet", "d/test-0.parquet"],
        "org/set", "d/train-*-of-*.parquet", 2,
    ),
    "numbered": (["train-0.jsonl", "train-1.jsonl"], "org/set", "train-*.jsonl", 2),
    "pattern": (["a-x.jsonl", "a-y.jsonl", "b.jsonl"], "org/set/a-*.jsonl", "a-*.jsonl", 2),
}  # fmt: skip


@pytest.mark.parametrize("case", PIECES)
def test_data_set_in_pieces_gives_all_of_them(hub: Hub, case: str) -> None:
    files, name, expected, count = PIECES[case]
    content = {file: b'{"prompt": "%d"}\n' % i for i, file in enumerate(files)}
    hub.repositories["datasets/org/set"] = Repository(branches={"v1": content})
    found = prompt_file(named(name, "v1", setting="data.train"), ALONE, split="train")
    assert str(found).endswith(expected) and sum(hub.served.values()) == count
    assert len(list(found.parent.glob(found.name))) == count


@pytest.mark.parametrize("case", DATA)
def test_data_set_gives_the_file_that_is_meant(hub: Hub, case: str) -> None:
    files, name, split, expected = DATA[case]
    content = {file: file.encode() for file in files}
    hub.repositories["datasets/org/set"] = Repository(branches={"v1": content})
    meant = named(name, "v1", setting=f"data.{split}")
    if expected in files:
        found = prompt_file(meant, ALONE, split=split)
        assert found.read_bytes() == expected.encode()
        assert sum(hub.served.values()) == 1, "the other file was not needed"
        return
    with pytest.raises(ConfigError) as refusal:
        prompt_file(meant, ALONE, split=split)
    assert expected in str(refusal.value)
    assert not hub.served, "nothing is fetched before it is clear what"
