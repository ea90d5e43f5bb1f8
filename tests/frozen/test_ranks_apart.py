"""Layer: whole runs of train_ppo.py. Frozen models on ranks of their own: the same PPO steps."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.hybrid.test_micro_dp import compare
from tests.operate.train_processes import Attempt
from tests.rewards.test_reward_model import write_word_tokenizer
from tests.tiny_models import write_tiny_model, write_tiny_reward_model
from tests.trainer import run_case

VOWELS = {"function": "tests.trainer.run_case:vowels"}


def apart(**ranks) -> dict:
    return {f"model__{role}__ranks": numbers for role, numbers in ranks.items()}


# name → ranks of the run, ranks that train, what differs, what both runs have, marks
CASES = {
    "actor_0_reward_1": (2, 1, apart(reward=[1]), dict(rollout__max_running=2), []),
    "actor_0_3_reward_4_5": (
        6, 4, apart(reward=[4, 5]) | {"model__reward__parallel": {"tp": 1}},
        dict(parallel={"tp": 2}, rollout__max_running=2, evaluation__at_end=True),
        pytest.mark.slow,
    ),
    "micro_dp_reference_1_reward_3_word_tokenizer_function": (
        4, 2, apart(reference=[1], reward=[3]) | {"model__reference__parallel": {"tp": 1},
                                                  "model__reward__parallel": {"tp": 1}},
        dict(parallel={"tp": 2}, reward=VOWELS, evaluation__at_end=True, hybrid_engine={
            "mode": "micro_dp", "generation_tp": 1, "generation_pp": 1,
        }), pytest.mark.slow,
    ),
    "dynamic_sampling_reference_1": (
        2, 1, apart(reference=[1]),
        dict(reward=VOWELS, algorithm__dynamic_sampling={"enable": True}), pytest.mark.slow,
    ),
    "deterministic_reference_1_2": (
        3, 1, apart(reference=[1, 2]), dict(reward=VOWELS, training__deterministic=True),
        pytest.mark.slow,
    ),
}  # fmt: skip


def folders(name: str, tiny_model, tmp_path: Path) -> dict:
    """The actor, and a reference and a reward model that are other models."""
    models = {
        "model__reference": {"path": str(write_tiny_model("llama", tmp_path / "ref", seed=9))}
    }
    if "reward" in name:
        folder = write_tiny_reward_model(tiny_model("mistral"), tmp_path / "reward")
        if "word_tokenizer" in name:
            write_word_tokenizer(folder)
        models["model__reward"] = {"path": str(folder)}
    return models


def finished(values: dict, folder: Path, world: int) -> list[dict]:
    """The rows of metrics of a run that every rank left in good order."""
    attempt = Attempt(folder, values, world)
    try:
        assert attempt.wait() == [0] * world, attempt.said
    finally:
        attempt.end()
    return rows(values)


def rows(values: dict) -> list[dict]:
    path = Path(values["run_dir"]) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def without_rates(row: dict) -> dict:
    """What a rank computes per second does not count a model that is elsewhere."""
    return {name: x for name, x in row.items() if not name.startswith("throughput/")}


@pytest.mark.ranks
@pytest.mark.parametrize("name", [pytest.param(n, marks=CASES[n][-1]) for n in CASES])
def test_ppo_is_the_same_with_frozen_models_on_ranks_of_their_own(
    ranks, tiny_model, tmp_path, name
):
    world, training, own, common, _ = CASES[name]
    actor, common = str(tiny_model("llama")), {"reward": {}, "training__steps": 1} | common
    common |= folders(name, tiny_model, tmp_path)
    together, split = (
        run_case.settings(actor, tmp_path / folder, **copy.deepcopy(common | more))
        for folder, more in (("a", {}), ("b", own))
    )
    ranks(training, run_case.train, together)
    got, want = finished(split, tmp_path / "b", world), rows(together)
    assert len(got) == len(want)
    compare(without_rates(got[0]), without_rates(want[0]))
    for mine, other in zip(got[1:], want[1:], strict=True):  # the evaluation at the end
        assert mine == {name: pytest.approx(x, rel=1e-5) for name, x in other.items()}
    if "rollout__max_running" in common:
        evaluated = 8 * ("evaluation__at_end" in common)
        check_stream(
            Path(split["run_dir"]), training, samples=16 + evaluated,
            replicas=training // common.get("parallel", {"tp": 1})["tp"],
        )  # fmt: skip


def check_stream(run_dir: Path, rank: int, *, samples: int, replicas: int) -> None:
    """Two responses run at a time, so a replica hands its samples in bit by bit."""
    said = (run_dir / "logs" / f"rank_{rank:05d}.log").read_text()
    found = re.search(r"scored (\d+) samples of (\d+) messages", said)
    assert found and int(found[1]) == samples
    assert int(found[2]) >= samples / replicas / 2 + 1, "samples waited for each other"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("what", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_of_the_model_stops_or_dies_and_so_do_all(tiny_model, tmp_path, what):
    name = "actor_0_1_reward_2"
    values = run_case.settings(
        str(tiny_model("llama")), tmp_path, reward={}, training__steps=1000,
        **folders(name, tiny_model, tmp_path), **apart(reward=[2]),
    )  # fmt: skip
    attempt = Attempt(tmp_path, values, 3)
    try:
        deadline = time.monotonic() + 120
        while not rows(values) and time.monotonic() < deadline:
            assert attempt.processes[2].is_alive(), attempt.said
            time.sleep(0.1)
        os.kill(attempt.processes[2].pid, what)
        codes = attempt.wait(seconds=90)
        if what == signal.SIGTERM:
            assert codes == [75, 75, 75], attempt.said
            assert "the reward model's ranks stopped with the training" in attempt.said
            assert list((Path(values["run_dir"]) / "checkpoints").glob("step_*"))
        else:
            assert codes[2] == -signal.SIGKILL and 0 not in codes, attempt.said
            assert "rank 2's process is dead" in attempt.said
    finally:
        attempt.end()
