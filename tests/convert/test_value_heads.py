"""Layer: pure. Critics and reward models in and out, under the names that people save them with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.convert.hf_weights import VALUE_HEADS
from megatron_rl.convert.kinds import open_model
from megatron_rl.convert.model_folder import whole
from tests.convert.test_round_trip import assert_same_weights, convert, weights
from tests.tiny_models import write_tiny_reward_model


def critic_folder(policy: Path, folder: Path, head: dict[str, torch.Tensor], **renamed) -> Path:
    """A policy's trunk with the tensors `head` in place of (or beside) its output layer."""
    shutil.copytree(policy, folder)
    tensors = weights(policy)
    if not renamed.get("keep_policy"):
        tensors.pop("lm_head.weight", None)
    prefix = renamed.get("prefix")
    if prefix is not None:
        tensors = {prefix + name.removeprefix("model."): x for name, x in tensors.items()}
    save_file({**tensors, **head}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", VALUE_HEADS)
def test_every_common_name_in_and_out(tiny_model_dir, tmp_path, name):
    head = {f"{name}.weight": torch.randn(1, 64), f"{name}.bias": torch.randn(1)}
    source = critic_folder(tiny_model_dir, tmp_path / "source", head)
    convert("hf-to-megatron", source, tmp_path / "m", "--role", "critic")
    model = open_model(tmp_path / "m", "critic")
    assert not model.fresh_head
    assert torch.equal(whole(model, "output_layer.weight"), head[f"{name}.weight"])
    assert torch.equal(whole(model, "output_layer.bias"), head[f"{name}.bias"])
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "back", "--head-name", name)
    assert_same_weights(weights(tmp_path / "back"), weights(source))


@pytest.mark.parametrize("prefix", ["", "pretrained_model.model."])
def test_trunks_under_other_prefixes(tiny_model_dir, tmp_path, prefix):
    head = {"v_head.summary.weight": torch.randn(1, 64), "v_head.summary.bias": torch.randn(1)}
    source = critic_folder(tiny_model_dir, tmp_path / "source", head, prefix=prefix)
    convert("hf-to-megatron", source, tmp_path / "m", "--role", "critic")
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "back")
    expected = {k: v for k, v in weights(tiny_model_dir).items() if k != "lm_head.weight"}
    expected |= {f"score.{k.rpartition('.')[2]}": v for k, v in head.items()}
    assert_same_weights(weights(tmp_path / "back"), expected)


def test_a_policy_with_its_critics_head(tiny_model_dir, tmp_path):
    """One folder of both: the actor leaves the head, the critic the vocabulary."""
    head = {"v_head.summary.weight": torch.randn(1, 64), "v_head.summary.bias": torch.randn(1)}
    source = critic_folder(tiny_model_dir, tmp_path / "source", {}, keep_policy=True)
    save_file(head, source / "value_head.safetensors")
    for role in ("actor", "critic"):
        convert("hf-to-megatron", source, tmp_path / role, "--role", role)
        convert("megatron-to-hf", tmp_path / role, tmp_path / f"{role}_back")
    assert_same_weights(weights(tmp_path / "actor_back"), weights(tiny_model_dir))
    critic = weights(tmp_path / "critic_back")
    assert torch.equal(critic["score.weight"], head["v_head.summary.weight"])
    assert "lm_head.weight" not in critic


def test_a_critic_from_a_policy_starts_at_zero(tiny_model, tmp_path, family):
    convert("hf-to-megatron", tiny_model(family), tmp_path / "m", "--role", "critic")
    model = open_model(tmp_path / "m", "critic")
    assert not whole(model, "output_layer.weight").any()
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "critic")
    found = weights(tmp_path / "critic")
    assert not found.pop("score.weight").any()
    expected = {k: v for k, v in weights(tiny_model(family)).items() if k != "lm_head.weight"}
    assert_same_weights(found, expected)


def scores(folder: Path, kind: str = "Sequence") -> torch.Tensor:
    """What transformers gives, with no tensor missing or left over."""
    import transformers

    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.num_labels == 1
    ids = torch.randint(0, 250, (3, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(ids).logits


def test_transformers_scores_an_exported_reward_model_alike(tiny_model, tmp_path, family):
    source = write_tiny_reward_model(tiny_model(family), tmp_path / "source")
    convert("hf-to-megatron", source, tmp_path / "m")
    assert list(json.loads((tmp_path / "m" / "state.json").read_text())["roles"]) == ["reward"]
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "back")
    assert_same_weights(weights(tmp_path / "back"), weights(source))
    assert torch.equal(scores(tmp_path / "back"), scores(source))


def test_a_critic_with_a_bias_is_a_token_classifier(tiny_model_dir, tmp_path):
    """transformers' sequence classifiers have no bias: the values of every token keep it."""
    head = {"score.weight": torch.randn(1, 64), "score.bias": torch.tensor([7.0])}
    source = critic_folder(tiny_model_dir, tmp_path / "source", head)
    convert("hf-to-megatron", source, tmp_path / "m", "--role", "critic")
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "back")
    values = scores(tmp_path / "back", "Token")
    head["score.bias"].zero_()
    plain = critic_folder(tiny_model_dir, tmp_path / "plain", head)
    convert("hf-to-megatron", plain, tmp_path / "p", "--role", "critic")
    convert("megatron-to-hf", tmp_path / "p", tmp_path / "plain_back")
    assert "score.bias" not in weights(tmp_path / "plain_back")
    torch.testing.assert_close(values[:, -1], scores(tmp_path / "plain_back") + 7.0)
