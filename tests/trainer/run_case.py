"""Tiny PPO runs: a random model, a dense reward, a few steps on any layout."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = ["one plus two", "the cat sat", "a b c d e f g", "hello", "zzz", "numbers: 1 2 3"]


def vowels(prompts, responses, records):
    """A reward without data: the share of small letters among the response's characters."""
    return [sum(c.islower() for c in r) / max(len(r), 1) for r in responses]


def starts_small(prompts, responses, records):
    """0 or 1: often the same for all samples of a prompt."""
    return [float(r[:1].islower()) for r in responses]


def write_prompts(folder: Path, count: int = 24) -> Path:
    path = folder / "prompts.jsonl"
    rows = [{"prompt": f"{QUESTIONS[i % len(QUESTIONS)]} {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(model: str, folder: Path, **changes) -> dict:
    """A small PPO run as nested dictionaries; `changes` are dotted keys with __ for the dots."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = write_prompts(folder)
    values = {
        "run_dir": str(folder / "run"), "model": {"actor": {"path": model}},
        "data": {"train": str(prompts), "eval": str(prompts)},
        "reward": {"function": "tests.trainer.run_case:vowels"},
        "rollout": {"batch_size": 8, "n": 2, "max_new_tokens": 6},
        "algorithm": {"name": "ppo", "kl": {"placement": "reward", "coef": 0.05}},
        "training": {
            "steps": 3, "epochs": 2, "mini_batch_size": 8, "micro_batch_size": 2,
            "actor": {"lr": 1e-3, "eps": 1e-3}, "critic": {"lr": 1e-3, "eps": 1e-3},
        },
        "evaluation": {"prompts": 8}, "monitor": {"console": False, "preflight": "off"},
        "runtime": {"device": "cpu"},
    }  # fmt: skip
    if changes.get("algorithm__name", "ppo") != "ppo":
        values["training"].pop("critic")
    for key, value in changes.items():
        node = values
        *parents, last = key.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return values


def run(rank, world, values, steps):
    """Runs `steps` steps; returns each step's metrics."""
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        return [trainer.step() for _ in range(steps)]
    finally:
        trainer.close()


def train(rank, world, values):
    """A whole run with its evaluations and checkpoints; returns what `Trainer.train` does."""
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        return trainer.train()
    finally:
        trainer.close()


def only_the_best(scores_B, rewards_BR, values_BR, mask_BR, group_B):
    """The advantage estimator of docs/algorithms.md."""
    import torch

    advantages_BR = torch.zeros_like(rewards_BR)
    for group in group_B.unique():
        rows = group_B == group
        gap_B = scores_B[rows] - scores_B[rows].max()
        advantages_BR[rows] = gap_B[:, None] * mask_BR[rows]
    return advantages_BR, {"best_score": scores_B.max()}


def plain_policy_gradient(logp, old_logp, advantages, weights):
    """The policy loss of docs/algorithms.md."""
    loss_sum = -(weights * (logp - old_logp).exp() * advantages).sum()
    return loss_sum, {"policy_loss": loss_sum.detach(), "tokens": (weights != 0).sum()}
