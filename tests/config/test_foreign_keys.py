"""Pure: keys of other trainers' files mean one of our settings or are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_rl.config import Config, ConfigError, not_yet
from megatron_rl.config.foreign_keys import FOREIGN_KEYS, as_markdown, translate
from megatron_rl.config.schema import leaf_keys

POST = """\
model:
  actor: actor_folder
  critic: critic_folder
data: {train: prompts.jsonl}
parallel: {tp: 2, distributed_optimizer: false}
training:
  rollout_batch_size: 32
  clip_grad_norm: 0.5
hybrid_engine:
  enable_3d: true
  zero_repartitioning: true
  actor_shard_strategy: tensor
  critic_shard_strategy: tensor
  reward_model_offload: {enable: false}
checkpoint_config: {format: torch, save_interval: 5}
generation_backend: megatron
training_backend: megatron
"""


@pytest.fixture
def post(tmp_path: Path) -> Path:
    path = tmp_path / "post.yaml"
    path.write_text(POST)
    return path


def test_a_configuration_as_posted_is_readable(post: Path) -> None:
    config = Config.load(post)
    assert (config.role_path("actor"), config.role_path("critic")) == (
        "actor_folder",
        "critic_folder",
    )
    assert config.rollout.batch_size == 32
    assert config.training.grad_reduce == "ddp"
    assert config.training.actor.clip_grad == config.training.critic.clip_grad == 0.5
    assert config.checkpoint.save_interval == 5
    assert config.checkpoint.format == "torch_dist"
    assert config.hybrid_engine.mode == "zero_repartitioning"
    assert config.model.critic.parallel is None
    ours = yaml.safe_load(config.to_yaml())
    assert not {"checkpoint_config", "generation_backend", "training_backend"} & set(ours)


def test_critic_cut_by_layer_gets_a_pipeline_over_the_same_ranks(post) -> None:
    by_layer = "hybrid_engine.critic_shard_strategy=layer"
    own = Config.load(post, [by_layer]).role_parallel("critic")
    assert (own.tp, own.pp) == (1, 2)


def test_one_gradient_limit_without_a_critic_sets_the_actor_only(post: Path) -> None:
    post.write_text(POST.replace("  critic: critic_folder\n", ""))
    config = Config.load(post, ["algorithm.name=grpo", "rollout.n=2"])
    assert config.training.actor.clip_grad == 0.5
    assert config.training.critic.clip_grad == 1.0


REFUSED = [
    ("training.num_rollout_workers=8", ("num_rollout_workers = 8", "every rank", "remove it")),
    ("training_backend=fsdp", ("training_backend = 'fsdp'", "Megatron-Core", "'megatron'")),
    ("checkpoint_config.format=hdf5", ("format = 'hdf5'", "file locks", "'torch'")),
    ("resource_pool={a: 1}",
     ("resource_pool = {'a': 1}", "share the ranks that train", "model.reward.ranks")),
    ("lora={r: 8}", ("lora = {'r': 8}", "LoRA", "remove it")),
    ("model.lora.r=8", ("model.lora = {'r': 8}", "LoRA", "remove it")),
    ("hybrid_engine.enable_3d_hybrid=false", ("enable_3d_hybrid = false", "off", "use true")),
    ("hybrid_engine.enable_3d=false", ("actor_shard_strategy", "needs enable_3d: true")),
    ("hybrid_engine.zero_repartitioning=false", ("= false", "mode=micro_dp", "use true")),
    ("hybrid_engine.zero_repartitioning=1", ("zero_repartitioning = 1", "use true")),
    ("hybrid_engine.actor_shard_strategy=rows", ("= 'rows'", "tensor or layer", "parallel.tp")),
    ("hybrid_engine.actor_shard_strategy=layer", ("= 'layer'", "parallel.tp is 2", "tp=1")),
    ("hybrid_engine.critic_shard_strategy=rows", ("= 'rows'", "tensor or layer", "set model.cr")),
    ("enable_3d=true", ("enable_3d and hybrid_engine.enable_3d are both given", "keep one")),
    ("rollout.batch_size=64", ("training.rollout_batch_size sets rollout.batch_size", "keep one")),
    ("clip_grad_norm=1", ("training.actor.clip_grad, which is given already", "keep one")),
    ("training.distributed_optimizer=true", ("training.grad_reduce, which is given", "keep one")),
    ("parallel.distributed_optimizer=maybe", ("= 'maybe'", "true or false", "use true or false")),
    ("checkpoint_config.compress=true", ("checkpoint_config.compress", "no such setting")),
    ("generation_backend=sglang", ("rollout.backend = 'sglang'", "megatron or vllm", "give")),
    ("actor_offload=true", ("hybrid_engine.actor_offload = true", "section", "mapping")),
]


@pytest.mark.parametrize(("override", "parts"), REFUSED, ids=lambda case: str(case)[:40])
def test_key_without_a_meaning_here_is_refused_with_the_reason(post, override, parts) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config.load(post, [override])
    for part in parts:
        assert part in str(refusal.value), str(refusal.value)


def test_reading_leaves_the_given_dictionary_alone() -> None:
    values = yaml.safe_load(POST)
    Config.from_dict(values)
    assert values == yaml.safe_load(POST)


def test_no_foreign_key_hides_a_setting_of_ours() -> None:
    ours = set(leaf_keys(Config))
    for dotted, key in FOREIGN_KEYS.items():
        assert not any(f"{name}.".startswith(f"{dotted}.") for name in ours), dotted
        assert key.meaning.endswith(".")


OFFLOAD = {"enable": True, "offload_device": "cpu", "pin_memory": False, "num_threads": 2}
DISTRIBUTED = (True, {"training.grad_reduce": "distributed_optimizer"})
# One value for every row, and what it becomes; None: it is refused.
EXAMPLES: dict[str, tuple[object, dict[str, object] | None]] = {
    "training.rollout_batch_size": (32, {"rollout.batch_size": 32}),
    "training.num_rollout_workers": (8, None),
    "training.clip_grad_norm": (0.5, {"training.actor.clip_grad": 0.5}),
    "clip_grad_norm": (0.5, {"training.critic.clip_grad": 0.5}),
    "gradient_compression": (
        {"enable": True, "method": "int8", "allreduce_fusion": True},
        {"training.gradient_compression.allreduce_fusion": True},
    ),
    "enable_3d": (True, {}),
    "enable_3d_hybrid": (True, {}),
    "zero_repartitioning": (True, {"hybrid_engine.mode": "zero_repartitioning"}),
    "actor_shard_strategy": ("tensor", {}),
    "critic_shard_strategy": ("layer", {"model.critic.parallel": {"tp": 1, "pp": 4}}),
    "micro_dp_size": (2, {"hybrid_engine.micro_dp_size": 2}),
    **{
        f"{role}_offload": (OFFLOAD, {f"hybrid_engine.{role}_offload": OFFLOAD})
        for role in ("actor", "critic", "reference", "reward")
    },
    "reward_model_offload": (OFFLOAD, {"hybrid_engine.reward_offload": OFFLOAD}),
    "checkpoint_config.save_interval": (5, {"checkpoint.save_interval": 5}),
    "checkpoint_config.format": ("torch", {"checkpoint.format": "torch_dist"}),
    "generation_backend": ("megatron", {"rollout.backend": "megatron"}),
    "training_backend": ("megatron", {}),
    "resource_pool": ({"gpus": 8}, None),
    "lora": ({"r": 8}, None),
    "model.lora": ({"r": 8}, None),
    "training.lora": ({"r": 8}, None),
    "parallel.distributed_optimizer": DISTRIBUTED,
    "training.distributed_optimizer": DISTRIBUTED,
}


def nested(dotted: str, value: object) -> dict:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def look_up(values: dict, dotted: str) -> object:
    for key in dotted.split("."):
        values = values[key]
    return values


@pytest.mark.parametrize("dotted", FOREIGN_KEYS)
def test_every_row_does_what_it_says(dotted: str) -> None:
    name = dotted.removeprefix("hybrid_engine.")
    value, becomes = EXAMPLES[name]
    values = {"parallel": {"tp": 4}} if "shard" in name else {}
    if "shard" in name:
        values["enable_3d"] = True
    section, _, key = dotted.rpartition(".")
    given = nested(dotted, value)
    for outer, inner in given.items():
        values[outer] = {**values.get(outer, {}), **inner} if section else inner
    if becomes is None:
        with pytest.raises(ConfigError, match=f"^{dotted} = "):
            translate(values)
        return
    result = translate(values)
    for ours, expected in becomes.items():
        assert look_up(result, ours) == expected
    assert key not in result.get(section, {}) if section else dotted not in result


BOTH = ["enable_3d", "enable_3d_hybrid", "zero_repartitioning", "actor_shard_strategy",
        "critic_shard_strategy", "micro_dp_size", "actor_offload", "critic_offload",
        "reference_offload", "reward_offload", "reward_model_offload"]  # fmt: skip


@pytest.mark.parametrize("name", BOTH)
def test_a_key_in_both_places_is_an_error(name: str) -> None:
    value = EXAMPLES[name][0]
    with pytest.raises(ConfigError, match="keep one of them"):
        translate({name: value, "hybrid_engine": {name: value}, "parallel": {"tp": 4}})


def test_offload_without_a_device_is_an_error(post: Path, monkeypatch) -> None:
    monkeypatch.setattr(not_yet, "NOT_YET", {})
    with pytest.raises(ConfigError, match="actor_offload.offload_device = null: is required"):
        Config.load(post, ["hybrid_engine.actor_offload={enable: true}"])
    config = Config.load(post, ["actor_offload={enable: true, offload_device: cpu}"])
    assert config.hybrid_engine.actor_offload.enable


def test_the_page_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "foreign_config.md"
    assert page.read_text().endswith(f"-->\n{as_markdown()}"), "the comment there says how to renew"
