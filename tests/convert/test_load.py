"""Layer: gloo ranks. Every kind of model folder fills a model alike, under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.convert.kinds import open_model
from tests.convert.test_round_trip import assert_same_weights, convert, weights
from tests.tiny_models import TINY
from tests.trainer import run_case

LAYOUTS = {
    "tp1": dict(world=1), "tp2": dict(world=2, tp=2), "pp2": dict(world=2, pp=2),
    "tp2_pp2": dict(world=4, tp=2, pp=2), "pp2_vpp2": dict(world=2, pp=2, vpp=2),
    "tp4": dict(world=4, tp=4),
}  # fmt: skip


def loaded(path: str, role: str, layout: dict) -> dict[str, torch.Tensor]:
    """This rank's parameters after loading; they start as garbage."""
    from megatron_rl.convert.load import load_weights
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    groups = ParallelGroups(layout=Layout(**layout))
    seed_model_parallel(0, groups)
    folder = open_model(path, role)
    folder.check()
    model = build_model(role, folder.architecture, groups)
    for _, parameter in model.named_parameters():
        parameter.data.fill_(torch.nan)
    load_weights(model, folder)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def loads_agree(rank, world, paths, role, layout):
    first, *others = (loaded(path, role, {**layout, "world_size": world}) for path in paths)
    for other in others:
        assert_same_weights(other, first)
    assert not any(p.isnan().any() for p in first.values())


QUICK = {("llama_tied", "tp2_pp2"), ("llama_padded_heads", "tp2_pp2"), ("llama_one_kv_head", "tp4")}
CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in QUICK else pytest.mark.slow)
    for name in sorted(TINY)
    for layout in LAYOUTS
]


@pytest.mark.ranks
@pytest.mark.parametrize("name, layout", CASES)
def test_megatron_and_hugging_face_folders_load_alike(ranks, tiny_model, tmp_path, name, layout):
    """Families with padded heads, fewer KV heads than ranks and tied embeddings among them."""
    source, spec = tiny_model(name), dict(LAYOUTS[layout])
    convert("hf-to-megatron", source, tmp_path / "m", "--max-shard-size", "100KB")
    for role in ("actor", "critic") if layout == "tp2_pp2" else ("actor",):
        ranks(spec["world"], loads_agree, [str(source), str(tmp_path / "m")], role,
              {k: v for k, v in spec.items() if k != "world"})  # fmt: skip


def train_save_export(rank, world, values, folder):
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        trainer.step()
        step = trainer.save()
        trainer.checkpoints.wait()
        trainer.export(folder)
        return str(step)
    finally:
        trainer.close()


def start_and_export(rank, world, values, folder):
    """Starts a run and exports its actor; returns the names of the models that were trained."""
    from megatron_rl import Config, Trainer
    from megatron_rl.convert.huggingface import gathered_tensors

    trainer = Trainer(Config.from_dict(values))
    try:
        trainer.export(folder)
        critic = dict(gathered_tensors(trainer.models.critic.model))
        reference = dict(gathered_tensors(trainer.models.reference))
        return critic, reference
    finally:
        trainer.close()


@pytest.mark.ranks
def test_a_step_of_a_run_is_a_model_folder(ranks, tiny_model_dir, tmp_path):
    """It converts to what the run exports, and another run starts from it under another layout."""
    values = run_case.settings(str(tiny_model_dir), tmp_path, parallel__tp=2)
    (step, _) = ranks(2, train_save_export, values, str(tmp_path / "exported"))
    exported = weights(tmp_path / "exported")
    assert any(
        not torch.equal(value, exported[name]) for name, value in weights(tiny_model_dir).items()
    ), "the run changed nothing"
    convert("megatron-to-hf", Path(step), tmp_path / "converted")
    assert_same_weights(weights(tmp_path / "converted"), exported)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        both = [(tmp_path / f / name).read_text() for f in ("exported", "converted")]
        assert both[0] == both[1], name

    # The folder of the steps stands for the newest one.
    next_run = run_case.settings(
        str(Path(step).parent), tmp_path, parallel__pp=2, run_dir=str(tmp_path / "next")
    )
    critics_and_references = ranks(2, start_and_export, next_run, str(tmp_path / "again"))
    critic, reference = critics_and_references[0]
    assert_same_weights(weights(tmp_path / "again"), exported)
    assert_same_weights(reference, exported)
    convert("megatron-to-hf", Path(step), tmp_path / "critic", "--role", "critic")
    assert_same_weights(critic, weights(tmp_path / "critic"))
    assert critic["score.weight"].any(), "the run's own critic is used, not a fresh head"


@pytest.mark.ranks
def test_weights_are_no_run_to_resume(ranks, tiny_model_dir, tmp_path):
    convert("hf-to-megatron", tiny_model_dir, tmp_path / "m")
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, checkpoint__resume=str(tmp_path / "m")
    )
    (message,) = ranks(1, refusal, values)
    assert "holds weights only" in message and "model.actor.path" in message


def refusal(rank, world, values):
    from megatron_rl import Config, ConfigError, Trainer

    try:
        Trainer(Config.from_dict(values)).close()
    except ConfigError as error:
        return str(error)
    return None
