"""launch/quickstart.sh: its commands, its arguments, and how it fits itself to the machine."""

import os
import re

import pytest

from tests.bootstrap.checkout_copy import commands


def torchrun(result) -> str:
    assert result.returncode == 0, result.stderr
    return commands(result.stdout)[-1]


def test_dry_run_prints_everything_and_does_nothing(checkout):
    result = checkout.run("launch/quickstart.sh", "--dry-run")
    assert [
        re.sub(r"^\S*env OMP\S* ", "", line).split()[:3] for line in commands(result.stdout)
    ] == [
        ["python3.11", "-m", "venv"],
        [".venv/bin/python", "-m", "pip"],
        [".venv/bin/python", "-m", "launch.fetch_smollm2"],
        [".venv/bin/python", "-m", "launch.make_sums"],
        [".venv/bin/torchrun", "--standalone", "--nproc_per_node=2"],
    ]
    assert checkout.calls() == [] and not (checkout.folder / ".venv").exists()
    assert torchrun(result).endswith("train_ppo.py --config configs/quickstart.yaml")


def test_quickstart_runs_what_the_dry_run_shows(checkout):
    shown = commands(checkout.run("launch/quickstart.sh", "--dry-run", "--steps", "2").stdout)
    checkout.run("launch/test.sh")  # makes .venv
    checkout.calls()
    runner = '#!/bin/bash\necho "torchrun $OMP_NUM_THREADS $*" >>"$LOG"\nexit 7\n'
    checkout.executable(checkout.folder / ".venv" / "bin" / "torchrun", runner)
    result = checkout.run("launch/quickstart.sh", "--steps", "2")
    assert result.returncode == 7  # that of the training
    assert commands(result.stdout) == shown[2:]
    *prepared, trained = checkout.calls()
    assert prepared == ["python -m launch.fetch_smollm2", "python -m launch.make_sums"]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert trained.startswith(f"torchrun {threads} --standalone --nproc_per_node=2 train_ppo.py")
    assert trained.endswith("training.steps=2")


@pytest.mark.parametrize(
    ("gpus", "visible", "ranks", "tp"),
    [
        (0, None, 2, None),
        (1, None, 1, "1"),
        (2, None, 2, None),
        (8, None, 2, None),
        (8, "3", 1, "1"),
        (8, "3,5", 2, None),
        (8, "", 2, None),
        (8, "-1", 2, None),
        (0, "0", 2, None),
    ],
)
def test_ranks_follow_the_gpus(checkout, gpus, visible, ranks, tp):
    lines = "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-{i})'\n" for i in range(gpus))
    checkout.program("nvidia-smi", f"#!/bin/bash\n{lines}exit {0 if gpus else 9}\n")
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = torchrun(checkout.run("launch/quickstart.sh", "--dry-run", **environment))
    assert f"--nproc_per_node={ranks} " in command
    assert re.findall(r"parallel\.tp=(\d+)", command) == ([tp] if tp else [])


def test_settings_are_passed_on_after_ours(checkout):
    arguments = ["--steps", "3", "--dry-run", "--", "training.steps=4", "data.train=a b.jsonl"]
    command = torchrun(checkout.run("launch/quickstart.sh", *arguments))
    assert command.endswith("training.steps=3 training.steps=4 data.train=a\\ b.jsonl")


def test_other_cache_is_used_for_model_and_data(checkout, tmp_path):
    command = torchrun(
        checkout.run("launch/quickstart.sh", "--dry-run", MEGATRON_RL_CACHE="tmp/../elsewhere")
    )
    for setting in (
        "model.actor.path=/elsewhere/smollm2-135m-instruct",
        "data.train=/elsewhere/sums/train.jsonl",
        "data.eval=/elsewhere/sums/heldout.jsonl",
    ):
        assert f" {setting}" in command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps"], "--steps needs a whole number of at least 1, not ''"),
        (["--steps", "0"], "not '0'"),
        (["--steps", "2.5"], "not '2.5'"),
        (["--stesp", "2"], "unknown argument '--stesp'"),
        (["training.steps=3"], "settings go after --"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(checkout, arguments, message):
    result = checkout.run("launch/quickstart.sh", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert commands(result.stdout) == [] and checkout.calls() == []


def test_help_is_the_head_of_the_script(checkout):
    result = checkout.run("launch/quickstart.sh", "--help")
    assert result.returncode == 0
    for part in ("--dry-run", "--steps N", "MEGATRON_RL_CACHE"):
        assert part in result.stdout
    assert "set -euo" not in result.stdout
