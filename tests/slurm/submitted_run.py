"""A run submitted through launch/slurm/submit.py, and what the tests look at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.slurm.cluster import Cluster, wait_until

ROOT = Path(__file__).resolve().parents[2]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Run:
    """A submitted run in a folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.config = folder / "run it.yaml"  # the space is on purpose
        self.job_id = ""
        self.model = folder  # the stand-in trainer loads no model

    def write_config(self, steps: int) -> None:
        self.config.write_text(
            f"run_dir: {self.folder}/run\n"
            f"model: {{actor: {{path: {self.model}}}}}\n"
            f"data: {{train: {self.folder}/train.jsonl}}\n"
            "reward: {function: megatron_rl.rewards.functions:first_integer_exact}\n"
            "rollout: {batch_size: 4, max_new_tokens: 4}\n"
            f"training: {{steps: {steps}}}\n"
            "runtime: {device: cpu, grace_time: 10}\n"
            "monitor: {preflight: fail}\n"
        )

    def submit(self, *options: str, steps: int = 20, **variables: str) -> None:
        """Submit through submit.py with two ranks on one node unless `options` say otherwise."""
        self.write_config(steps)
        submitted = subprocess.run(
            [sys.executable, str(ROOT / "launch/slurm/submit.py"), "--config", str(self.config),
             "--ranks-per-node=2", "--cpus-per-node=2", "--time=10", "--partition=debug",
             "--train-script=tests/slurm/counting_run.py", f"--log-dir={self.folder}/logs",
             *options],
            env={**self.cluster.environment, "PYTHONPATH": str(ROOT), **variables},
            capture_output=True, text=True,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stderr
        self.job_id = submitted.stdout.split()[-1]

    def wait(self, *states: str, seconds: float = 300) -> dict[str, str]:
        try:
            return self.cluster.wait_for(self.job_id, set(states) or ENDED, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- log\n{self.log}") from None

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: len(self.steps) >= step, 240, f"step {step}", lambda: self.log)

    @property
    def log(self) -> str:
        path = self.folder / f"logs/{self.job_id}.out"
        return path.read_text() if path.exists() else ""

    @property
    def steps(self) -> list[int]:
        """Every step that was done, in order, over all attempts."""
        metrics = self.folder / "run/metrics.jsonl"
        if metrics.exists():
            return [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        path = self.folder / "run/steps.txt"
        return [int(line) for line in path.read_text().split()] if path.exists() else []
