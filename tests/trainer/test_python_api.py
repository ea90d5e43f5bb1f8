"""Layer: one gloo rank. A run from Python: the same trainer, a reward that is a plain function."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers
import yaml

from tests.tiny_models import edit_config
from tests.trainer import run_case


def drive(rank, world, path, overrides, export):
    """The README's loop, and an export."""
    from megatron_rl import Config, Trainer

    def reward(prompts, responses, records):
        return [float(len(r)) for r in responses]

    trainer = Trainer(Config.load(path, overrides), reward=reward)
    rewards = [trainer.step()["reward/mean"] for _ in range(2)]
    held_out = trainer.evaluate()
    saved = trainer.save()
    trainer.close()
    trainer.close()
    resumed = Trainer(Config.load(path, overrides), reward=reward)
    step = resumed.step_count
    rewards.append(resumed.step()["reward/mean"])
    resumed.export(export)
    resumed.close()
    return rewards, held_out, str(saved), step


@pytest.mark.ranks
def test_run_from_python(ranks, tiny_model_dir, tmp_path):
    model, tokenizer = model_and_tokenizer(tiny_model_dir, tmp_path)
    values = run_case.settings(str(model), tmp_path, model__tokenizer={"path": str(tokenizer)})
    values.pop("reward")
    path, export = tmp_path / "run.yaml", tmp_path / "export"
    path.write_text(yaml.safe_dump(values))
    overrides = ["training.epochs=1"]
    rewards, held_out, saved, step = ranks(1, drive, str(path), overrides, str(export))[0]
    assert len(rewards) == 3 and all(r > 0 for r in rewards)
    assert held_out["eval/prompts"] == 8 and held_out["eval/reward_mean"] > 0
    assert Path(saved).is_dir() and step == 2
    for folder in (Path(saved) / "huggingface", export):
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 259
        assert tokens_of(folder) == tokens_of(tokenizer) != tokens_of(model)


def model_and_tokenizer(folder: Path, parent: Path) -> tuple[Path, Path]:
    """Copies of a model's folder: one whose tokenizer is not the right one, and the tokenizer."""
    model, tokenizer = parent / "model", parent / "tokenizer"
    shutil.copytree(folder, model)
    shutil.copytree(folder, tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    text = (model / "tokenizer.json").read_text().replace("<eos>", "<end>")
    (model / "tokenizer.json").write_text(text)
    edit_config(tokenizer, vocab_size=7)
    return model, tokenizer


def tokens_of(folder: Path) -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(folder)("the cat<eos>")["input_ids"]


@pytest.mark.ranks
def test_own_estimator_and_loss_are_used(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, algorithm__name="rloo", algorithm__kl={"placement": "none"},
        algorithm__advantage_function="tests.trainer.run_case:only_the_best",
        algorithm__policy_loss_function="tests.trainer.run_case:plain_policy_gradient",
    )  # fmt: skip
    metrics = ranks(2, run_case.run, values, 1)[0][0]
    assert metrics["advantage/mean"] <= 0
    assert metrics["policy/grad_norm"] > 0
