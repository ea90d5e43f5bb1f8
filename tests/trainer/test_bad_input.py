"""Layer: pure. Wrong input ends a run with one sentence and exit code 2, before any process group.

Each case names the setting and the way out. The settings' own rules are in tests/config, what a
run needs of the machine in test_bad_surroundings.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import train_ppo
from tests.tiny_models import write_tiny_model
from tests.trainer import run_case
from tests.trainer.bad_input_case import (
    bad_line,
    broken_tokenizer,
    copy_model,
    cut_weights,
    larger_than_the_disk,
    larger_tokenizer,
    other_weights,
    outcome,
    pickled,
    sharded,
    text,
    write,
)


def model(make: Callable[..., str], *args: Any, **kwargs: Any) -> Callable[..., dict]:
    """A case whose actor is what `make` writes."""
    return lambda m, f: {"model__actor": {"path": make(m, f, *args, **kwargs)}}


CASES = {
    "truncated_safetensors": (model(cut_weights), ["model.actor.path", "cut short"]),
    "missing_shard": (
        model(sharded, '{"weight_map": {{}}}'), ["missing", "model-00002-of-00002.safetensors"],
    ),
    "broken_index": (model(sharded, '{"weight_map"'), ["index.json", "not an index of weights"]),
    "index_out_of_the_folder": (
        model(sharded, '{"weight_map": {"a": "../../x.safetensors"}}'), ["outside its folder"],
    ),
    "missing_tensor": (
        model(other_weights, "model.norm.weight"), ["missing model.norm.weight"],
    ),
    "tensor_of_another_model": (
        model(other_weights, **{"model.layers.0.extra": torch.zeros(1)}),
        ["unexpected model.layers.0.extra"],
    ),
    "tensor_of_another_shape": (
        model(other_weights, **{"model.norm.weight": torch.zeros(3)}),
        ["model.norm.weight", "(3,)", "(64,)"],
    ),
    "weights_that_hold_code": (model(pickled), ["pytorch_model.bin", "model.actor.path"]),
    "config_is_not_json": (
        lambda m, f: {"model__actor": {"path": str(Path(text(f, "{", "config.json")).parent)}},
        ["config.json is not valid JSON"],
    ),
    "no_layers": (model(copy_model, num_hidden_layers=0), ["num_hidden_layers is 0", "positive"]),
    "heads": (model(copy_model, num_attention_heads=5), ["num_attention_heads 5", "multiple"]),
    "broken_tokenizer": (
        lambda m, f: {"model__tokenizer": {"path": broken_tokenizer(f)}},
        ["model.tokenizer.path", "no tokenizer can be loaded"],
    ),
    "no_tokenizer": (
        lambda m, f: {"model__tokenizer": {"path": str(f / "none")}}, ["no such folder", "hub id"],
    ),
    "no_sentencepiece_file": (
        lambda m, f: {"model__tokenizer": {"type": "sentencepiece", "path": str(f)}},
        ["tokenizer.model", "SentencePiece model file"],
    ),
    "no_sentencepiece_model": (
        lambda m, f: {"model__tokenizer": {"type": "sentencepiece", "path": text(f, "pieces")}},
        ["is not a SentencePiece model"],
    ),
    "hub_id_offline": (
        lambda m, f: {"model__actor": {"path": "org/not-cached"}}, ["HF_HUB_OFFLINE", "cache"],
    ),
    "data_set_offline": (
        lambda m, f: {"data__train": "org/not-cached"}, ["data.train", "HF_HUB_OFFLINE"],
    ),
    "revision_of_a_folder": (
        lambda m, f: {"model__actor": {"path": str(m), "revision": "v1"}},
        ["model.actor.revision is 'v1'", "only hub ids have revisions"],
    ),
    "negative_temperature": (lambda m, f: {"rollout__temperature": -1}, ["at least 0"]),
    "wrong_type": (lambda m, f: {"training__steps": "ten"}, ["training.steps = 'ten'", "whole"]),
    "out_of_range": (lambda m, f: {"training__actor": {"beta1": 1.5}}, ["beta1 = 1.5", "less"]),
    "checkpoint_folder_not_writable": (
        lambda m, f: {"checkpoint__dir": "/proc/no/checkpoints"}, ["checkpoint.dir", "/proc"],
    ),
    "run_folder_under_a_file": (
        lambda m, f: {"run_dir": text(f, "") + "/run"}, ["run_dir", "nothing can be written"],
    ),
    "no_room_for_a_checkpoint": (
        lambda m, f: {"model__actor": {"path": larger_than_the_disk(f)},
                      "checkpoint__save_interval": 1},
        ["checkpoint.save_interval is 1", "GiB at least", "checkpoint.dir to a larger disk"],
    ),
    "no_checkpoint_to_resume": (
        lambda m, f: {"checkpoint__resume": str(f / "none")}, ["checkpoint.resume", "no such fol"],
    ),
    "world": (lambda m, f: {"parallel__tp": 2}, ["parallel.tp", "divide the 1 ranks"]),
    "tp_does_not_fit_ffn": (
        lambda m, f: {"model__actor": {"path": copy_model(m, f, intermediate_size=97)},
                      "parallel__tp": 2},
        ["feed-forward size 97", "tp that fits: [1]"],
    ),
    "ep_tp_does_not_divide": (
        lambda m, f: {"parallel__tp": 2, "parallel__ep": 3}, ["parallel.ep", "use one of [1, 2]"],
    ),
    "ep_tp_does_not_fit_a_dense_model": (
        lambda m, f: {"parallel__tp": 2, "parallel__ep": 2},
        ["parallel.ep=2", "it has no experts", "ep that fits: [1]"],
    ),
    "experts_tp_does_without_sp": (
        lambda m, f: {"model__actor": {"path": str(write_tiny_model("mixtral", f / "moe"))},
                      "parallel__tp": 2},
        ["parallel.sp is false", "mixture of experts", "parallel.sp=true"],
    ),
    "experts_tp_does_micro_dp": (
        lambda m, f: {"model__actor": {"path": str(write_tiny_model("mixtral", f / "moe"))},
                      "parallel__tp": 2, "parallel__sp": True, "hybrid_engine__mode": "auto"},
        ["hybrid_engine.mode is auto", "mixture of experts", "zero_repartitioning"],
    ),
    "layers_do_not_fit": (
        lambda m, f: {"parallel__pp": 3}, ["parallel.pp=3", "4 layers", "[1, 2, 4]"],
    ),
    "no_model_folder": (
        lambda m, f: {"model__actor": {"path": str(f / "nowhere")}},
        ["model.actor.path", "nowhere", "no such folder"],
    ),
    "folder_without_config": (
        lambda m, f: {"model__actor": {"path": str(f)}}, ["no config.json", "model.actor.path"],
    ),
    "unknown_family": (
        lambda m, f: {"model__actor": {"path": copy_model(m, f, model_type="bert")}},
        ["'bert'", "llama", "qwen3"],
    ),
    "unknown_field": (
        lambda m, f: {"model__actor": {"path": copy_model(m, f, logit_scale=0.5)}},
        ["logit_scale", "0.5"],
    ),
    "rope_kind": (
        lambda m, f: {"model__actor": {"path": copy_model(
            m, f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})}},
        ["yarn", "llama3"],
    ),
    "no_prompt_file": (
        lambda m, f: {"data__train": str(f / "missing.jsonl")}, ["data.train", "missing.jsonl"],
    ),
    "empty_prompt_file": (
        lambda m, f: {"data__train": text(f, "\n\n")}, ["data.train", "no prompts"],
    ),
    "malformed_line": (lambda m, f: {"data__train": bad_line(f)}, ["row 3", "not JSON"]),
    "missing_key": (
        lambda m, f: {"data__train": text(f, '{"question": "a"}\n')}, ["prompt 1", "'prompt'"],
    ),
    "prompt_too_long": (
        lambda m, f: {"data__train": text(f, json.dumps({"prompt": "x" * 600}) + "\n")},
        ["prompt 1 has 600 tokens", "511"],
    ),
    "held_out_too_long": (
        lambda m, f: {"data__eval": text(f, json.dumps({"prompt": "y" * 30}) + "\n"),
                      "data__max_prompt_length": 20},
        ["data.eval", "30 tokens", "20"],
    ),
    "reward_module": (
        lambda m, f: {"reward": {"function": "no_such_module:score"}},
        ["reward.function", "no_such_module", "can't be imported"],
    ),
    "reward_name": (
        lambda m, f: {"reward": {"function": "tests.trainer.run_case:no_such_name"}},
        ["no function 'no_such_name'"],
    ),
    "reward_file": (
        lambda m, f: {"reward": {"function": f"{f}/missing.py:score"}}, ["missing.py"],
    ),
    "reward_signature": (
        lambda m, f: {"reward": {"function": "tests.trainer.run_case:write_prompts"}},
        ["signature", "prompts, responses, records"],
    ),
    "own_loss_signature": (
        lambda m, f: {"algorithm__policy_loss_function": "tests.trainer.run_case:vowels"},
        ["algorithm.policy_loss_function", "logp, old_logp, advantages, weights"],
    ),
    "own_estimator_missing": (
        lambda m, f: {"algorithm__advantage_function": "tests.trainer.run_case:nothing"},
        ["algorithm.advantage_function", "no function 'nothing'"],
    ),
    "packed_attention_on_the_cpu": (
        lambda m, f: {"model__attention_backend": "varlen", "training__dtype": "bf16"},
        ["model.attention_backend is 'varlen'", "on the CPU", "attention_backend=torch"],
    ),
    "weights_of_another_vocabulary": (
        lambda m, f: {"model__reference": {"path": copy_model(m, f, vocab_size=300)},
                      "algorithm__kl": {"placement": "loss", "estimator": "full", "coef": 0.1}},
        ["model.reference.path", "(259, 64)", "expected (300, 64)"],
    ),
    "no_reward": (lambda m, f: {"reward": {}}, ["reward.function is null"]),
    "tokenizer_of_another_model": (
        lambda m, f: {"model__tokenizer": {"path": larger_tokenizer(f)}},
        ["model.tokenizer.path", "261 tokens", "vocabulary has 259"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(case, tiny_model_dir, tmp_path, monkeypatch, capsys):
    change, expected = CASES[case]
    changes = change(tiny_model_dir, tmp_path)
    values = run_case.settings(str(tiny_model_dir), tmp_path, **changes)
    world = 3 if case == "layers_do_not_fit" else 2 if "tp_does" in case else 1
    if case == "layers_do_not_fit":
        values["rollout"]["batch_size"] = 9
        values["training"]["mini_batch_size"] = 9
    code, error = outcome(monkeypatch, capsys, write(tmp_path, values), world=world)
    lines = [line for line in error.splitlines() if not line.startswith("warning:")]
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("error: "), error
    for fragment in expected:
        assert fragment in lines[0], lines[0]


def test_missing_yaml_and_unknown_key(tiny_model_dir, tmp_path, monkeypatch, capsys):
    code, error = outcome(monkeypatch, capsys, str(tmp_path / "nothing.yaml"))
    assert code == 2 and "nothing.yaml" in error
    path = write(tmp_path, run_case.settings(str(tiny_model_dir), tmp_path))
    code, error = outcome(monkeypatch, capsys, path, "training.stepz=3")
    assert code == 2 and "training.steps" in error


def test_print_config_shows_every_setting(tiny_model_dir, tmp_path, monkeypatch, capsys):
    from megatron_rl import Config

    path = write(tmp_path, run_case.settings(str(tiny_model_dir), tmp_path))
    monkeypatch.setattr(
        sys, "argv", ["train_ppo.py", "--config", path, "--print-config", "seed=5"]
    )
    assert train_ppo.main() == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["seed"] == 5
    assert Config.from_dict(shown) == Config.load(path, ["seed=5"])


def test_incomplete_rank_environment(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", "--config", "x.yaml"])
    assert train_ppo.main() == 2
    assert "WORLD_SIZE" in capsys.readouterr().err


def test_the_table_is_large_enough():
    assert len(CASES) >= 40


def test_a_full_kl_needs_one_vocabulary(tiny_model_dir):
    from dataclasses import replace

    from megatron_rl.config import Config, ConfigError
    from megatron_rl.models.families import read_architecture
    from megatron_rl.run_inputs import _check_vocabularies

    kl = {"placement": "loss", "estimator": "full", "coef": 0.1}
    config = Config.from_dict(
        run_case.settings(str(tiny_model_dir), tiny_model_dir, algorithm__kl=kl)
    )
    actor = read_architecture(tiny_model_dir)
    _check_vocabularies(config, {"actor": actor, "reference": actor})
    with pytest.raises(ConfigError, match="estimator is 'full', but .*'reference': 300.*k3"):
        _check_vocabularies(config, {"actor": actor, "reference": replace(actor, vocab=300)})
