"""Layer: pure. Wrong input ends a run with one sentence and exit code 2, before any process group.

Each case names the setting and the way out. The settings' own rules are in tests/config.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from transformers import AutoTokenizer

import train_ppo
from tests.tiny_models import edit_config, write_byte_tokenizer
from tests.trainer import run_case


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


def text(folder: Path, content: str) -> str:
    path = folder / "other.jsonl"
    path.write_text(content)
    return str(path)


def larger_tokenizer(folder: Path) -> str:
    target = folder / "tokenizer"
    write_byte_tokenizer(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(target)
    return str(target)


CASES = {
    "world": (lambda m, f: {"parallel__tp": 2}, ["parallel.tp", "divide the 1 ranks"]),
    "tp_does_not_fit_ffn": (
        lambda m, f: {"model__actor": {"path": copy_model(m, f, intermediate_size=97)},
                      "parallel__tp": 2},
        ["feed-forward size 97", "tp that fits: [1]"],
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
    "malformed_line": (lambda m, f: {"data__train": bad_line(f)}, ["prompt 3", "not JSON"]),
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
    "stop_text_of_several_tokens": (
        lambda m, f: {"rollout__stop": ["\n", "end"]},
        ["rollout.stop", "'end'", "3 tokens", "rollout.stop_token_ids"],
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
