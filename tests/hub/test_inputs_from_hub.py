"""Layer: pure, against a real HTTP server. Every input of a run may be a hub id."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl import Config, ConfigError
from megatron_rl.run_inputs import RunInputs
from tests.hub.hub_server import Hub, Repository
from tests.trainer import run_case


def test_model_tokenizer_and_prompts_by_id(hub: Hub, tiny_model, tmp_path: Path) -> None:
    for name in ("llama", "qwen3"):
        model = Repository.of_folder(tiny_model(name))
        model.branches = {"v1": model.branches["main"]}
        hub.repositories[f"models/org/{name}"] = model
    lines = run_case.write_prompts(tmp_path).read_bytes()
    hub.repositories["datasets/org/set"] = Repository(branches={"v2": {"train.jsonl": lines}})
    values = run_case.settings("org/llama", tmp_path)
    values["model"] |= {
        "actor": {"path": "org/llama", "revision": "v1"},
        "reference": {"path": "org/qwen3", "revision": "v1"},
        "tokenizer": {"path": "org/qwen3", "revision": "v1"},
    }
    values["data"] = {"train": "org/set", "revision": "v2"}
    inputs = RunInputs.check(Config.from_dict(values), None)
    assert {role: path.parents[1].name for role, path in inputs.folders.items()} == {
        "actor": "models--org--llama", "critic": "models--org--llama",
        "reference": "models--org--qwen3",
    }  # fmt: skip
    assert inputs.architectures["reference"].family == "qwen3"
    assert len(inputs.stream.file) == 24 and inputs.may_be_late

    values["model"]["tokenizer"]["revision"] = "v9"
    with pytest.raises(ConfigError, match="model.tokenizer.revision is 'v9'"):
        RunInputs.check(Config.from_dict(values), None)
    values["model"].pop("tokenizer")
    values["data"] = {"train": str(tmp_path / "prompts.jsonl"), "revision": "v2"}
    with pytest.raises(ConfigError, match="data.revision is 'v2', but .* are on this disk"):
        RunInputs.check(Config.from_dict(values), None)


def test_inference_engine_names_what_it_cannot_fetch(hub: Hub) -> None:
    from megatron_rl import create_inference_engine

    with pytest.raises(ConfigError, match="model_path is 'org/none'.*nor a repository"):
        create_inference_engine("org/none")
