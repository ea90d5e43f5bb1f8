"""Pure: every wrong setting ends in one ConfigError with setting, value, rule and way out."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.not_yet import NOT_YET
from megatron_rl.config.schema import check_type, hints, section_class

GRPO = ("algorithm.name=grpo", "rollout.n=4")

# (overrides, what the message must contain: setting and value, part of the rule, way out)
CASES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    # wrong type
    (("parallel.tp=two",), ("parallel.tp = 'two'", "whole number", "give")),
    (("parallel.tp=2.0",), ("parallel.tp = 2.0", "whole number", "write 2")),
    (("parallel.tp=true",), ("parallel.tp = true", "whole number", "give")),
    (("parallel.sp=yes",), ("parallel.sp = 'yes'", "true or false", "without quotes")),
    (("parallel.sp=1",), ("parallel.sp = 1", "true or false", "give")),
    (("run_dir=2024",), ("run_dir = 2024", "text", "quotes")),
    (("training.actor.lr=fast",), ("training.actor.lr = 'fast'", "finite number", "give")),
    (("training.actor.lr=.inf",), ("training.actor.lr = inf", "finite number", "give")),
    (("training.actor.lr=.nan",), ("training.actor.lr = nan", "finite number", "give")),
    (("training.actor.lr=null",), ("training.actor.lr = null", "finite number", "give")),
    (("rollout.stop=x",), ("rollout.stop = 'x'", "list", "[a, b]")),
    (("rollout.stop_token_ids=[1, a]",), ("rollout.stop_token_ids", "'a'", "whole number")),
    (("reward.kwargs=[1]",), ("reward.kwargs = [1]", "mapping", "give")),
    (("training=5",), ("training = 5", "section", "give a mapping")),
    (("hybrid_engine.share_embeddings=0",), ("share_embeddings = 0", "read_only", "false")),
    (("algorithm.name=gppo",), ("algorithm.name = 'gppo'", "reinforce_plus_plus", "mean ppo?")),
    (("training.dtype=float32",), ("training.dtype = 'float32'", "must be fp32", "bf16")),
    # unknown key
    (("parallel.tensor=2",), ("parallel.tensor = 2", "no such setting", "nearest one is")),
    (("training.actor.learning_rate=1",), ("training.actor.learning_rate", "nearest one is")),
    (("lr=1e-5",), ("lr = 1e-05", "no such setting", "training.actor.lr")),
    (("paralel.tp=2",), ("paralel.tp = 2", "no such setting", "nearest one is parallel.tp")),
    # out of range
    (("seed=-1",), ("seed = -1", "at least 0", "choose a value >= 0")),
    (("parallel.tp=0",), ("parallel.tp = 0", "at least 1", "choose a value >= 1")),
    (("rollout.n=0",), ("rollout.n = 0", "at least 1", "choose")),
    (("rollout.temperature=-0.5",), ("rollout.temperature = -0.5", "at least 0", "choose")),
    (("rollout.top_p=0",), ("rollout.top_p = 0.0", "greater than 0", "<= 1")),
    (("rollout.top_p=1.5",), ("rollout.top_p = 1.5", "at most 1", "> 0")),
    (("algorithm.gamma=1.1",), ("algorithm.gamma = 1.1", "at most 1", "choose")),
    (("algorithm.clip_low=1",), ("algorithm.clip_low = 1.0", "less than 1", "choose")),
    (("algorithm.dual_clip=1",), ("algorithm.dual_clip = 1.0", "greater than 1", "choose")),
    (("algorithm.kl.coef=-0.1",), ("algorithm.kl.coef = -0.1", "at least 0", "choose")),
    (("training.steps=0",), ("training.steps = 0", "at least 1", "choose")),
    (("training.actor.lr=0",), ("training.actor.lr = 0.0", "greater than 0", "choose")),
    (("training.actor.beta2=1",), ("training.actor.beta2 = 1.0", "less than 1", "choose")),
    (("rollout.stop=['']",), ("rollout.stop = ''", "form", "non-empty")),
    (("rollout.stop_token_ids=[-1]",), ("rollout.stop_token_ids = -1", "at least 0", "choose")),
    (("reward.function=score",), ("reward.function = 'score'", "form", "package.module:function")),
    (("runtime.grace_time=-1",), ("runtime.grace_time = -1.0", "greater than 0", "choose")),
    # required
    (("model.actor.path=null",), ("model.actor.path = null", "required", "folder")),
    (("data.train=''",), ("data.train = ''", "required", "JSONL")),
    # contradictions: layout
    (("parallel.sp=true",), ("parallel.sp = true", "parallel.tp is 1", "parallel.sp=false")),
    (("parallel.vpp=2",), ("parallel.vpp = 2", "parallel.pp is 1", "parallel.vpp=1")),
    (("model.actor.parallel.tp=2",), ("model.actor.parallel", "'tp': 2", "set parallel.tp")),
    (("model.critic.revision=v1",), ("model.critic.revision = 'v1'", "null", "model.critic.path")),
    (
        ("model.reference.enable=false", "model.reference.path=x"),
        ("model.reference.path = 'x'", "no effect", "remove it"),
    ),
    (("model.tokenizer.eos_token=</s>",), ("eos_token = '</s>'", "SentencePiece", "remove it")),
    # contradictions: algorithm
    (("algorithm.name=grpo",), ("rollout.n = 1", "compares", "2 or more")),
    (("algorithm.name=rloo",), ("rollout.n = 1", "compares", "2 or more")),
    ((*GRPO, "rollout.temperature=0"), ("rollout.temperature = 0.0", "greedy", "> 0")),
    ((*GRPO, "algorithm.lam=0.9"), ("algorithm.lam = 0.9", "no critic", "name=ppo")),
    ((*GRPO, "algorithm.value_clip=0.5"), ("value_clip = 0.5", "no critic", "name=ppo")),
    ((*GRPO, "algorithm.critic_warmup_steps=3"), ("critic_warmup_steps = 3", "no critic", "ppo")),
    ((*GRPO, "training.critic.lr=0.1"), ("training.critic.lr = 0.1", "no critic", "remove it")),
    ((*GRPO, "model.critic.path=x"), ("model.critic.path = 'x'", "no critic", "remove it")),
    ((*GRPO, "algorithm.gamma=0.9"), ("algorithm.gamma = 0.9", "discounts nothing", "remove it")),
    (("algorithm.advantage_std=none",), ("advantage_std = 'none'", "only grpo", "name=grpo")),
    (
        ("algorithm.name=reinforce_plus_plus", "algorithm.whiten_advantages=false"),
        ("whiten_advantages = false", "part of reinforce_plus_plus", "remove it"),
    ),
    (
        ("algorithm.loss_aggregation=constant",),
        ("algorithm.loss_constant = null", "required", "divide by"),
    ),
    (("algorithm.loss_constant=5",), ("loss_constant = 5.0", "no effect", "remove it")),
    (("algorithm.critic_warmup_steps=100",), ("critic_warmup_steps = 100", "100", "less than")),
    (
        ("algorithm.overlong={enable: true, max_length: 20, buffer: 21}",),
        ("algorithm.overlong.buffer = 21", "limit of 20", "at most 20"),
    ),
    (("algorithm.overlong.buffer=4",), ("overlong.buffer = 4", "no effect", "enable=true")),
    (("algorithm.importance_sampling.cap=3",), ("cap = 3.0", "no effect", "enable=true")),
    (("algorithm.kl.coef=0.1",), ("kl.coef = 0.1", "placement=none", "placement=reward")),
    (
        ("algorithm.kl.placement=reward", "model.reference.enable=false"),
        ("algorithm.kl.placement = 'reward'", "reference", "placement=none"),
    ),
    (
        ("algorithm.kl={placement: loss, adaptive: {enable: true}}",),
        ("algorithm.kl.coef = 0.0", "can't leave 0", "0.2"),
    ),
    (("algorithm.kl.adaptive.enable=true",), ("adaptive.enable = true", "no coefficient", "set")),
    *(
        ((f"algorithm.kl={{estimator: full, placement: {placement}, coef: {coef}}}",),
         ("algorithm.kl.estimator = 'full'", rule, "placement=loss"))
        for placement, coef, rule in (("none", 0, "only a loss"), ("reward", 0.1, "not steer"))
    ),
    *(
        (("algorithm.kl={estimator: full, placement: loss, coef: 0.1}", f"rollout.{cut}"),
         ("algorithm.kl.estimator = 'full'", f"rollout.{cut} trains a cut one", "estimator=k3"))
        for cut in ("top_k=5", "top_p=0.5")
    ),
    (
        ("algorithm.dynamic_sampling.enable=true",),
        ("dynamic_sampling.enable = true", "rollout.n is 1", "2 or more"),
    ),
    (("algorithm.dynamic_sampling.max_batches=3",), ("max_batches = 3", "no effect", "enable")),
    (
        ("model.attention_backend=varlen",),
        ("attention_backend = 'varlen'", "half precision", "dtype=bf16"),
    ),
    # contradictions: lengths and batches
    (
        ("data.max_prompt_length=9", "training.packing=false",
         "training.max_tokens_per_micro_batch=999"),
        ("training.packing = false", "counts", "micro_batch_size"),
    ),
    (
        ("rollout.max_new_tokens=4", "rollout.min_new_tokens=5"),
        ("rollout.min_new_tokens = 5", "max_new_tokens=4", "at most 4"),
    ),
    (
        ("data.max_prompt_length=9", "rollout.max_length=9"),
        ("rollout.max_length = 9", "no room", "more than 9"),
    ),
    (
        ("data.max_prompt_length=9", "training.max_tokens_per_micro_batch=264"),
        ("training.max_tokens_per_micro_batch = 264", "has 265 tokens", "at least 265"),
    ),
    (
        ("rollout.kv_cache_gb=1", "rollout.kv_memory_fraction=0.5"),
        ("rollout.kv_memory_fraction = 0.5", "no effect", "keep one"),
    ),
    (
        ("rollout.batch_size=48", "training.mini_batch_size=20"),
        ("training.mini_batch_size = 20", "48 samples", "[12, 16, 24]"),
    ),
    (
        ("training.micro_batch_size=2", "training.max_tokens_per_micro_batch=99"),
        ("training.micro_batch_size = 2", "also decides", "keep one"),
    ),
    (
        ("rollout.batch_size=4", "training.micro_batch_size=5"),
        ("training.micro_batch_size = 5", "mini-batch of 4", "at most 4"),
    ),
    # contradictions: optimizer and gradients
    (
        ("parallel.overlap_grad_reduce=true", "training.grad_reduce=manual"),
        ("overlap_grad_reduce = true", "manual", "overlap_grad_reduce=false"),
    ),
    (
        ("parallel.overlap_param_gather=true", "training.grad_reduce=ddp"),
        ("overlap_param_gather = true", "ddp", "distributed_optimizer"),
    ),
    (
        ("parallel.overlap_param_gather=true",),
        ("overlap_param_gather = true", "buckets", "overlap_grad_reduce=true"),
    ),
    (
        ("training.actor={schedule: cosine, lr: 1e-6, min_lr: 1e-5}",),
        ("training.actor.min_lr = 1e-05", "larger", "at most 1e-06"),
    ),
    (("training.critic.min_lr=1e-7",), ("critic.min_lr = 1e-07", "no effect", "cosine")),
    (("training.actor.warmup_steps=101",), ("warmup_steps = 101", "steps=100", "at most 100")),
    (("training.actor.momentum=0.9",), ("actor.momentum = 0.9", "only sgd", "name=sgd")),
    (
        ("training.gradient_compression.block_size=100",),
        ("gradient_compression.block_size = 100", "power of two", "128, 256 or 512"),
    ),
    (
        ("training.gradient_compression.error_feedback=true",),
        ("error_feedback = true", "no effect", "enable=true"),
    ),
    (
        ("training.gradient_compression.method=int4",),
        ("gradient_compression.method = 'int4'", "int8", "mean int8?"),
    ),
    # contradictions: generation layout, memory, the rest
    (
        ("parallel.tp=4", "hybrid_engine.generation_tp=2"),
        ("generation_tp = 2", "training layout", "micro_dp"),
    ),
    (("hybrid_engine.micro_dp_size=2",), ("micro_dp_size = 2", "one generation", "micro_dp")),
    (
        ("hybrid_engine.actor_offload.num_threads=4",),
        ("actor_offload.num_threads = 4", "no effect", "enable=true"),
    ),
    (("evaluation.at_end=true",), ("evaluation.at_end = true", "data.eval is null", "set")),
    (("evaluation.interval=5",), ("evaluation.interval = 5", "data.eval is null", "set")),
    (
        ("checkpoint.save_interval=10", "checkpoint.keep_every=25"),
        ("checkpoint.keep_every = 25", "save_interval=10", "20 or 30"),
    ),
    (("checkpoint.keep_every=25",), ("keep_every = 25", "null", "set checkpoint.save_interval")),
]


@pytest.mark.parametrize(("overrides", "parts"), CASES, ids=lambda case: case[-1])
def test_bad_setting_is_refused_with_setting_value_and_way_out(load, overrides, parts) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(*overrides)
    message = str(refusal.value)
    for part in parts:
        assert part in message, message
    assert "\n" not in message
    assert message.startswith(refusal.value.setting)


def test_the_table_is_large_enough() -> None:
    assert len(CASES) >= 40


def test_file_and_line_are_named_for_settings_of_the_file_only(minimal) -> None:
    minimal.write_text(minimal.read_text() + "rollout:\n  n: 1\n  top_p: 0\n")
    with pytest.raises(ConfigError, match=r"rollout\.top_p = 0\.0.*\(.*run\.yaml, line 5\)$"):
        Config.load(minimal)
    with pytest.raises(ConfigError, match=r"rollout\.top_p = 2\.0") as refusal:
        Config.load(minimal, ["rollout.top_p=2"])
    assert "line" not in str(refusal.value)


def test_settings_made_in_python_are_checked_like_those_of_a_file(load) -> None:
    config = load()
    wrong = dataclasses.replace(config.rollout, top_p=7.0)
    with pytest.raises(ConfigError, match=r"rollout\.top_p = 7\.0"):
        dataclasses.replace(config, rollout=wrong)
    with pytest.raises(ConfigError, match=r"rollout = 3"):
        dataclasses.replace(config, rollout=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rollout.top_p = 0.5


def _value_that_asks_for(dotted: str) -> object:
    """A well-typed value of ``dotted`` that its row refuses."""
    *path, last = dotted.split(".")
    cls = Config
    for name in path:
        cls = section_class(hints(cls)[name])
    hint = hints(cls)[last]
    if section_class(hint):
        return {"tp": 1}
    asks_for_it, _ = NOT_YET[dotted]
    for value in (True, 2, "text", [1], *typing.get_args(hint)):
        try:
            check_type(dotted, value, hint)
        except ConfigError:
            continue
        if asks_for_it(value):
            return value
    raise AssertionError(f"no value of {dotted} is refused")


@pytest.mark.parametrize("dotted", NOT_YET)
def test_features_to_come_are_refused_by_name(load, dotted) -> None:
    value = _value_that_asks_for(dotted)
    values = load().to_dict()
    *path, last = dotted.split(".")
    section = values
    for name in path:
        section = section[name]
    section[last] = value
    with pytest.raises(ConfigError, match="not supported yet: ") as refusal:
        Config.from_dict(values)
    assert refusal.value.setting == dotted
    assert f"leave {dotted} at its default" in str(refusal.value)


def test_every_row_of_the_features_to_come_lets_the_default_pass(load) -> None:
    config = load()
    for dotted, (asks_for_it, _) in NOT_YET.items():
        assert not asks_for_it(config.value(dotted)), dotted
