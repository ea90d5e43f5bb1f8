"""One optimizer step of the trainer's own losses under any layout, on a rollout that is fixed.

Everything here runs inside the ranks. `measure` returns raw gradients (before clipping), metrics,
log-probs and weights under Hugging Face names, so that layouts can be compared name by name.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
import torch.distributed as dist

AXES: dict[str, tuple] = {
    "dp": (1, 2, 4), "tensor": ("tp1", "tp2", "tp2_sp"), "pipeline": ("pp1", "pp2", "pp2_vpp2"),
    "micro": (1, 2, 4), "packing": (True, False), "recompute": ("none", "selective", "full"),
    "reduce": ("ddp", "distributed_optimizer", "manual"),
}  # fmt: skip
ONE_RANK = dict(
    dp=1, tensor="tp1", pipeline="pp1", micro=8, packing=True, recompute="none", reduce="ddp"
)
MOST_RANKS = 8

LENGTHS = [(3, 5), (1, 9), (6, 2), (60, 12), (4, 4), (2, 1), (5, 7), (7, 3)]
"""(prompt, response) tokens; one is long enough for attention to go sequence by sequence."""
OWNERS = {1: [0] * 8, 2: [0, 0, 0, 0, 0, 1, 1, 1], 4: [0, 0, 0, 1, 1, 2, 3, 3]}
"""Replica of each sample: uneven, so that some replicas run inert micro-batches."""
HOLE = (3, slice(2, 6))
"""A tool's output inside a response: masked."""


def world_size(spec: dict[str, Any]) -> int:
    return spec["dp"] * (1 + (spec["tensor"] != "tp1")) * (1 + (spec["pipeline"] != "pp1"))


def product() -> list[dict[str, Any]]:
    """Every layout that `MOST_RANKS` ranks can run."""
    every = (dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values()))
    return [spec for spec in every if world_size(spec) <= MOST_RANKS]


def pairs(spec: dict[str, Any]) -> set[tuple]:
    return set(itertools.combinations(sorted(spec.items()), 2))


def covering_set(seed: int = 0) -> list[dict[str, Any]]:
    """Layouts among which every possible pair of two axes' values occurs (greedy)."""
    candidates = product()
    random.Random(seed).shuffle(candidates)
    missing, chosen = set().union(*(pairs(spec) for spec in candidates)), []
    while missing:
        best = max(candidates, key=lambda s: (len(pairs(s) & missing), -world_size(s)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def rollout(seed: int = 5) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Sequences, per-token numbers `[B, R]` that the losses read, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, 256, (p + r,), generator=generator) for p, r in LENGTHS]
    width = max(r for _, r in LENGTHS)
    lengths = torch.tensor([r for _, r in LENGTHS])
    mask_BR = (torch.arange(width)[None] < lengths[:, None]).float()
    mask_BR[HOLE] = 0.0
    draw = {
        name: scale * torch.randn(len(LENGTHS), width, generator=generator)
        for name, scale in (("advantages", 1.0), ("values", 0.5), ("returns", 1.0),
                            ("old", 0.2), ("ref", 0.3), ("drift", 0.05))
    }  # fmt: skip
    return sequences, draw, mask_BR


def share(rank: int, dp: int, logp_BR: torch.Tensor) -> Any:
    """The samples of replica `rank`; `logp_BR` are log-probs of the actor."""
    from megatron_rl.rollout.batch import RolloutBatch
    from megatron_rl.rollout.prompts import Prompt

    sequences, draw, mask_BR = rollout()
    count = len(sequences)
    batch = RolloutBatch(
        prompts=[Prompt(index=i, text="", token_ids=[0], record={}) for i in range(count)],
        texts=[""] * count, sequences=sequences, prompt_lengths=[p for p, _ in LENGTHS],
        response_lengths=[r for _, r in LENGTHS], index_B=torch.arange(count),
        request_B=torch.arange(count),
        group_B=torch.arange(count) // 2, finished_B=torch.ones(count, dtype=torch.bool),
        mask_BR=mask_BR, rollout_logprobs_BR=logp_BR + draw["drift"],
        scores_B=torch.zeros(count), routes=[None] * count, tensors={
            "advantages": draw["advantages"], "values": draw["values"],
            "returns": draw["returns"], "old_logprobs": logp_BR + draw["old"],
            "ref_logprobs": logp_BR + draw["ref"],
        },
    )  # fmt: skip
    return batch.take([i for i in range(count) if OWNERS[dp][i] == rank])


def configuration(spec: dict[str, Any], folder: str, objective: str) -> Any:
    from megatron_rl import Config

    sgd = spec.get("optimizer", "sgd") == "sgd"
    optimizer = {"name": "sgd" if sgd else "adam", "lr": 0.05 if sgd else 1e-3, "eps": 1e-3}
    values = {
        "model": {"actor": {"path": folder}}, "data": {"train": "unused.jsonl"},
        "parallel": {
            "tp": 1 + (spec["tensor"] != "tp1"), "sp": spec["tensor"] == "tp2_sp",
            "pp": 1 + (spec["pipeline"] != "pp1"), "vpp": 1 + (spec["pipeline"] == "pp2_vpp2"),
        },
        "rollout": {"batch_size": 4, "n": 2, "temperature": 0.9, "max_new_tokens": 12},
        "training": {
            "micro_batch_size": spec["micro"], "packing": spec["packing"],
            "recompute": spec["recompute"], "grad_reduce": spec["reduce"],
            "actor": {**optimizer, "clip_grad": 0.0},
        },
        "algorithm": {"entropy_coef": 0.01, "dual_clip": 1.5, "clip_high": 0.3,
                      "kl": {"placement": "loss", "estimator": "k3", "coef": 0.1}},
    }  # fmt: skip
    if objective == "grpo":
        values["algorithm"] = {
            "name": "grpo", "loss_aggregation": "sequence_mean_token_mean",
            "kl": {"placement": "loss", "estimator": "full", "coef": 0.2},
            "importance_sampling": {"enable": True, "cap": 1.02},
        }  # fmt: skip
    else:
        values["training"]["critic"] = values["training"]["actor"]
    return Config.from_dict(values)


def build(role: str, config: Any, folder: str, world: int, *, trainable: bool = True) -> Any:
    """A `Trainable` (or a frozen model) of this layout; a critic gets a head that is not zero."""
    from megatron_rl.convert.huggingface import load_huggingface
    from megatron_rl.engine.optimizer import Trainable
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel

    own = config.parallel
    groups = ParallelGroups(layout=Layout(world_size=world, tp=own.tp, pp=own.pp, vpp=own.vpp))
    seed_model_parallel(0, groups)
    model = build_model(
        role, read_architecture(folder), groups, sp=own.sp, trainable=trainable,
        recompute=config.training.recompute if trainable else "none",
    )  # fmt: skip
    load_huggingface(model, folder, fresh_head=role == "critic")
    if role == "critic" and model.chunks[-1].post_process:
        generator = torch.Generator().manual_seed(8)
        head = model.chunks[-1].output_layer.weight
        head.data.copy_(torch.randn(head.shape, generator=generator) * 0.1)
    if not trainable:
        return model
    training = config.training
    return Trainable(
        model, training.actor, total_steps=10, distributed_optimizer=training.distributed_optimizer,
        one_all_reduce=training.grad_reduce == "manual",
    )  # fmt: skip


def complete_gradients(trainable: Any) -> None:
    """After a reduce-scatter each rank holds its part of the gradient: bring them together."""
    for chunk in trainable.model.wrapped:
        if chunk.ddp_config.use_distributed_optimizer:
            for bucket in (b for buffer in chunk.buffers for b in buffer.buckets):
                group = chunk.dp_cp_group
                part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, part, group=group)


def step(
    trainable: Any, batch: Any, config: Any, loss: Any, reference: Any = None, update: bool = True
) -> dict:
    """The trainer's update of one mini-batch, watched from inside; without `update` the weights
    stay as they are, and the next objective can be measured on them."""
    from megatron_rl.algorithms.metrics import mean_metrics
    from megatron_rl.convert.huggingface import gathered_tensors
    from megatron_rl.engine.optimizer import StepResult
    from megatron_rl.engine.update import mini_batches, update_step

    found: dict[str, Any] = {}
    original = trainable.step

    def watched_step():
        complete_gradients(trainable)
        found["gradients"] = _tensors(gathered_tensors(trainable.model, value=gradient_of))
        if update:
            return original()
        return StepResult(grad_norm=0.0, skipped=True, lr=0.0)

    trainable.step = watched_step
    (samples,) = mini_batches(batch, config)
    aggregation = config.algorithm.loss_aggregation
    result, sums = update_step(trainable, batch, samples, config, loss, aggregation, reference)
    trainable.step = original
    found["metrics"] = {**mean_metrics(sums), "grad_norm": result.grad_norm}
    found["weights"] = _tensors(gathered_tensors(trainable.model))
    return found


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.main_grad


def _tensors(named: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in named if value is not None}


def actor_logprobs(rank: int, world: int, folder: str) -> torch.Tensor:
    """Of the fixed rollout, on one rank."""
    from megatron_rl.engine.passes import logprob_pass

    config = configuration(ONE_RANK, folder, "ppo_actor")
    batch = share(0, 1, torch.zeros(len(LENGTHS), 12))
    model = build("actor", config, folder, world, trainable=False)
    return logprob_pass(batch, model, config)


def measure(
    rank: int, world: int, folder: str, reference_folder: str, spec: dict[str, Any],
    logp_BR: torch.Tensor, mutation: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """{objective: gradients, metrics, weights, and a pass's log-probs or values}."""
    from megatron_rl.engine.passes import value_pass
    from megatron_rl.engine.update import critic_loss
    from tests.engine.mutations import applied

    with applied(mutation):
        actor = _measure_actor(world, folder, reference_folder, spec, logp_BR)
        config = configuration(spec, folder, "ppo_critic")
        critic = build("critic", config, folder, world)
        batch = share(critic.model.groups.dp_rank, spec["dp"], logp_BR)
        passed = value_pass(batch, critic.model, config)[0]
        found = step(critic, batch, config, critic_loss(config))
        return {**actor, "ppo_critic": found | {"passes": _rows(batch, passed)}}


def _measure_actor(
    world: int, folder: str, reference_folder: str, spec: dict[str, Any], logp_BR: torch.Tensor
) -> dict[str, Any]:
    """GRPO's gradients first, with the reference; then PPO's, and its update."""
    from megatron_rl.engine.passes import logprob_pass
    from megatron_rl.engine.update import actor_loss

    grpo, ppo = (configuration(spec, folder, name) for name in ("grpo", "ppo_actor"))
    actor = build("actor", ppo, folder, world)
    reference = build("reference", grpo, reference_folder, world, trainable=False)
    batch = share(actor.model.groups.dp_rank, spec["dp"], logp_BR)
    on_policy = share(actor.model.groups.dp_rank, spec["dp"], logp_BR)
    del on_policy.tensors["old_logprobs"], on_policy.tensors["ref_logprobs"]
    found = {}
    passed = _rows(batch, logprob_pass(batch, actor.model, ppo))
    for name, config, samples in (("grpo", grpo, on_policy), ("ppo_actor", ppo, batch)):
        other = reference if name == "grpo" else None
        loss = actor_loss(actor.model, config, config.algorithm.kl.coef, other)
        found[name] = step(actor, samples, config, loss, other, update=name == "ppo_actor")
        found[name]["passes"] = passed
    return found


def _rows(batch: Any, values_BR: torch.Tensor) -> dict[int, torch.Tensor]:
    """Sample number → its row, without padding."""
    rows = zip(batch.index_B.tolist(), values_BR, strict=True)
    return {i: row[: LENGTHS[i][1]].clone() for i, row in rows}


def differences(
    got: list[dict[str, Any]], want: dict[str, Any], tolerance: float = 1e-5
) -> list[str]:
    """What differs between the ranks of a layout and one rank; empty when nothing does.

    Gradients and weights: largest difference of a parameter against its largest value. Metrics:
    relative, with a floor for those that are zero but for rounding.
    """
    found = []
    for objective, expected in want.items():
        for kind in ("gradients", "weights"):
            tensors = got[0][objective][kind]
            if tensors.keys() != expected[kind].keys():
                found.append(f"{objective} {kind}: other names")
                continue
            for name, right in expected[kind].items():
                error = (tensors[name].double() - right.double()).abs().max()
                share = float(error / right.abs().max())
                if not share <= tolerance:
                    found.append(f"{objective} {kind} {name}: {share:.1e}")
        for rank, result in enumerate(got):
            for name, right in expected["metrics"].items():
                value = result[objective]["metrics"][name]
                if not abs(value - right) <= tolerance * abs(right) + 2e-6:
                    found.append(f"{objective} rank {rank} {name}: {value} is not {right}")
            for sample, row in result[objective]["passes"].items():
                error = float((row - expected["passes"][sample]).abs().max())
                if not error <= tolerance * 10:
                    found.append(f"{objective} rank {rank} pass of sample {sample}: {error:.1e}")
    return found
