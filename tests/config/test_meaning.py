"""Pure: what the settings mean together: roles, sizes, worlds, warnings, help, shipped files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.help_texts import help_texts
from megatron_rl.config.schema import hints, leaf_keys, nearest_key, section_class

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_critic_and_reference_default_to_the_actor(load) -> None:
    config = load("model.actor={path: a, revision: r1}", "model.reference={path: b, revision: r2}")
    assert [config.role_path(role) for role in ("actor", "critic", "reference")] == ["a", "a", "b"]
    assert config.role_path("reward") is None
    revisions = [config.role_revision(role) for role in ("actor", "critic", "reference", "reward")]
    assert revisions == ["r1", "r1", "r2", None]


def test_sizes_follow_from_the_rollout(load) -> None:
    config = load("algorithm.name=grpo", "rollout={batch_size: 6, n: 4}")
    assert config.samples_per_step == 24 == config.mini_batch_size
    assert not config.has_critic
    assert config.with_overrides(["training.mini_batch_size=8"]).mini_batch_size == 8


def test_folders_default_to_the_run_folder(load) -> None:
    config = load("run_dir=runs/x")
    assert config.checkpoint_dir == Path("runs/x/checkpoints")
    assert config.comm_trace_dir == Path("runs/x/comm_trace")
    assert load("checkpoint.dir=/elsewhere").checkpoint_dir == Path("/elsewhere")


@settings(deadline=None)
@given(tp=st.integers(1, 8), pp=st.integers(1, 8), world=st.integers(1, 64))
def test_world_is_accepted_exactly_when_tp_pp_divides_it(tp: int, pp: int, world: int) -> None:
    values = {"model": {"actor": {"path": "m"}}, "data": {"train": "t"}}
    values |= {"parallel": {"tp": tp, "pp": pp}, "rollout": {"batch_size": 64 * 63 * 61 * 59}}
    config = Config.from_dict(values)
    if world % (tp * pp) == 0:
        assert config.parallel.validate_world(world) * tp * pp == world
        return
    with pytest.raises(ConfigError, match=rf"must divide the {world} ranks") as refusal:
        config.validate_world(world)
    for fitting in (size for size in range(1, world + 1) if world % (size * pp) == 0):
        assert str(fitting) in str(refusal.value)


def test_world_message_lists_what_fits(load) -> None:
    with pytest.raises(ConfigError) as refusal:
        load("parallel={tp: 4, pp: 2}").validate_world(6)
    assert "with pp=2 use parallel.tp in [1, 3]" in str(refusal.value)
    assert "start a multiple of 8 ranks" in str(refusal.value)


def test_batches_must_fill_all_replicas(load) -> None:
    config = load("parallel.tp=2", "rollout.batch_size=9", "training.mini_batch_size=3")
    assert config.validate_world(6) == 3
    with pytest.raises(ConfigError, match=r"rollout\.batch_size = 9: .* 2 .* use 8 or 10"):
        config.validate_world(4)
    with pytest.raises(ConfigError, match=r"training\.mini_batch_size = 3: .* use 9"):
        config.validate_world(18)


def test_k1_as_a_loss_warns_and_k3_does_not(load) -> None:
    def warned(estimator: str) -> bool:
        kl = f"algorithm.kl={{placement: loss, coef: 0.1, estimator: {estimator}}}"
        return any("algorithm.kl.estimator = k1" in line for line in load(kl).warnings())

    assert warned("k1")
    assert not warned("k3")
    assert any("greedy" in line for line in load("rollout.temperature=0").warnings())
    assert any("fp16" in line for line in load("training.dtype=fp16").warnings())
    assert any("reference" in line for line in load().warnings())


def test_longest_sequence_is_the_smaller_limit(load) -> None:
    rollout = load("rollout.max_new_tokens=10", "rollout.max_length=30").rollout
    assert rollout.longest_sequence(15) == 25
    assert rollout.longest_sequence(25) == 30
    assert rollout.longest_sequence(None) == 30
    assert load().rollout.longest_sequence(None) is None


AT_THE_LIMIT = [
    ("rollout={max_new_tokens: 5, min_new_tokens: 5}",),
    ("data.max_prompt_length=9", "training.max_tokens_per_micro_batch=265"),
    ("data.max_prompt_length=9", "rollout.max_length=10"),
    ("algorithm.overlong={enable: true, max_length: 20, buffer: 20}",),
    ("training={steps: 7, actor: {warmup_steps: 7}}",),
    ("training={steps: 7, actor: {schedule: linear, lr: 0.1, min_lr: 0.1}}",),
    ("training.steps=7", "algorithm.critic_warmup_steps=6"),
    ("rollout.batch_size=4", "training={mini_batch_size: 4, micro_batch_size: 4}"),
    ("checkpoint={save_interval: 5, keep_every: 5}",),
    ("rollout={temperature: 0, top_p: 1}",),
    ("algorithm.name=grpo", "rollout.n=2", "algorithm.advantage_std=none"),
    ("algorithm={name: rloo, gamma: 0.9, advantage_function: my.module:estimator}", "rollout.n=2"),
    ("parallel={pp: 2, vpp: 2}",),
    ("training.grad_reduce=manual",),
    ("reward.function=folder/my_rewards.py:score",),
]


@pytest.mark.parametrize("overrides", AT_THE_LIMIT, ids=str)
def test_value_at_the_limit_is_accepted(load, overrides: tuple[str, ...]) -> None:
    load(*overrides)


def _sections(cls: type) -> list[type]:
    nested = [section_class(hint) for hint in hints(cls).values()]
    return [cls, *(inner for found in nested if found for inner in _sections(found))]


@pytest.mark.parametrize("cls", _sections(Config), ids=lambda cls: cls.__name__)
def test_every_setting_has_a_help_text(cls: type) -> None:
    for name in hints(cls):
        text = help_texts(cls).get(name, "")
        assert text.endswith((".", "?")), f"{cls.__name__}.{name} needs a sentence under it"
        assert "\n" not in text, f"{cls.__name__}.{name}: one line"


def test_help_stands_above_each_setting(load) -> None:
    lines = load().to_yaml(with_help=True).splitlines()
    place = next(i for i, line in enumerate(lines) if line.strip() == "top_p: 1.0")
    assert lines[place - 1].strip().startswith("# Sample among the likeliest tokens")


LONG_NAMES = sorted(key for key in leaf_keys(Config) if len(key.rsplit(".", 1)[-1]) > 8)


@settings(deadline=None)
@given(st.sampled_from(LONG_NAMES), st.data())
def test_nearest_key_repairs_one_wrong_letter(dotted: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(dotted) - 1).filter(lambda i: dotted[i] != "."))
    wrong = dotted[:place] + "#" + dotted[place + 1 :]
    found = nearest_key(Config, wrong)
    assert len(found) == len(wrong)
    assert sum(a != b for a, b in zip(found, wrong, strict=True)) == 1


def test_nearest_key_prefers_the_same_name_in_another_section() -> None:
    assert nearest_key(Config, "model.reward.function") == "reward.function"
    assert nearest_key(Config, "rollout.steps") == "training.steps"
    assert nearest_key(Config, "model.critic.tp") == "model.critic.parallel.tp"
    assert nearest_key(Config, "critic.lr") == "training.critic.lr"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configuration_loads(path: Path) -> None:
    config = Config.load(path)
    assert config.warnings() == []


def test_shipped_configurations_fit_the_ranks_they_are_written_for() -> None:
    by_name = {path.name: Config.load(path) for path in SHIPPED}
    assert by_name["quickstart.yaml"].validate_world(2) == 1
    assert by_name["example_70b.yaml"].validate_world(64) == 2
