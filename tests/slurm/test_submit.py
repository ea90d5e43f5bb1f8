"""Rendering and refusing jobs. Layer: pure; bash reads the result; no Slurm needed."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.slurm import checks
from launch.slurm.render import Job, SubmitError, render
from launch.slurm.submit import main

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted(path.name for path in (ROOT / "launch/slurm").glob("*.sbatch"))
JOB = Job(
    template="ppo.sbatch", name="ppo", nodes=1, gpus_per_node=8, ranks_per_node=8,
    cpus_per_node=64, time="24:00:00", output="/logs/%j.out", signal_seconds=210,
)  # fmt: skip


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\nmodel: {{actor: {{path: {tmp_path}}}}}\n"
        f"data: {{train: {tmp_path}/train.jsonl}}\n"
        "reward: {function: megatron_rl.rewards.functions:first_integer_exact}\n"
        "rollout: {batch_size: 64, max_new_tokens: 4}\ntraining: {steps: 1}\n"
        "parallel: {tp: 8}\n"
    )
    return path


@pytest.fixture(autouse=True, scope="module")
def no_slurm():
    """Whatever cluster this machine belongs to is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "partitions", lambda: None)
        yield


def settings_in_bash(text: str, names: list[str]) -> dict[str, list[str]]:
    """What bash has in the settings of a rendered file, executed up to the source line."""
    head = text[: text.index("# shellcheck source=launch/slurm/job.sh")]
    dump = "\n".join(f'printf "%s\\0" {name} "${{{name}[@]}}"; printf "\\0\\0"' for name in names)
    done = subprocess.run(
        ["bash", "-c", head + dump], capture_output=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 0, done.stderr
    blocks = [block.split("\0") for block in done.stdout.decode().split("\0\0\0") if block]
    return {block[0]: block[1:] for block in blocks}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1), max_size=4)
)
def test_any_setting_reaches_bash_as_it_was(words):
    job = dataclasses.replace(JOB, settings={"OVERRIDES": words, "CONFIG": "x" + "".join(words)})
    found = settings_in_bash(render(job), ["OVERRIDES", "CONFIG"])
    # Three NUL separate the settings, so a trailing empty word cannot be told from none.
    assert found["CONFIG"] == ["x" + "".join(words)]
    assert found["OVERRIDES"] == words


def test_nothing_in_a_setting_is_executed(tmp_path):
    evil = f"a=$(touch {tmp_path}/pwned) `touch {tmp_path}/pwned`; touch {tmp_path}/pwned '\"\n#"
    job = dataclasses.replace(JOB, settings={"REPO": evil, "OVERRIDES": [evil]})
    found = settings_in_bash(render(job), ["REPO", "OVERRIDES"])
    assert found == {"REPO": [evil], "OVERRIDES": [evil]}
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("field", ["name", "partition", "account", "qos", "exclude", "time"])
@pytest.mark.parametrize("value", ["a b", "x\n#SBATCH --uid=0", "a'b", "$(id)", ""])
def test_value_that_cannot_stand_in_a_header_is_refused(field, value):
    with pytest.raises(SubmitError, match="SBATCH line"):
        render(dataclasses.replace(JOB, **{field: value}))


@pytest.mark.parametrize("output", ['/a"b/%j', "/a\nb", "/a\\b", "/a#b", ""])
def test_log_path_that_slurm_cannot_read_is_refused(output):
    with pytest.raises(SubmitError, match="--log-dir"):
        render(dataclasses.replace(JOB, output=output))


def test_header_says_what_was_asked():
    job = dataclasses.replace(
        JOB, nodes=4, partition="gpu", exclude="n[1-3],n7", output="/my logs/%j.out", array="1-5"
    )
    head = render(job).split("set -uo pipefail")[0].splitlines()
    for line in (
        "#SBATCH --nodes=4", "#SBATCH --gpus-per-node=8", "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=64", "#SBATCH --partition=gpu", "#SBATCH --exclude=n[1-3],n7",
        "#SBATCH --signal=B:USR1@210", "#SBATCH --requeue", "#SBATCH --array=1-5",
        '#SBATCH --output="/my logs/%j.out"', "#SBATCH --open-mode=append",
    ):  # fmt: skip
        assert head.count(line) == 1, line
    assert head[0] == "#!/usr/bin/env bash"
    one_task_per_rank = render(dataclasses.replace(JOB, launcher="srun"))
    assert (
        "#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n#SBATCH --cpus-per-task=8\n"
        in (one_task_per_rank)
    )
    assert (
        "gpus-per-node" not in render(dataclasses.replace(JOB, gpus_per_node=0)).split("set -")[0]
    )


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_gets_every_setting_it_names(template, config, tmp_path, capsys):
    """The settings that submit.py gives are the ones between the marks, and the file is bash."""
    options = {
        "ppo.sbatch": [],
        "ppo_multinode.sbatch": ["--nodes=2"],
        "ppo_container.sbatch": ["--container-image=i.sqsh"],
        "ppo_sweep.sbatch": [f"--sweep={tmp_path}/sweep"],
    }[template]
    (tmp_path / "sweep").write_text("training.actor.lr=1e-6\ntraining.actor.lr=2e-6\n")
    assert main(["--config", str(config), "--dry-run", *options]) == 0
    text = capsys.readouterr().out
    lines = (ROOT / "launch/slurm" / template).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# --- settings"))
    named = [line.split("=")[0] for line in lines[start + 1 : lines.index("# --- end of settings")]]
    for name in named:
        assert f"\n{name}=" in text, f"{template}: {name} is not given by submit.py"
    assert "# --- " not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    # The signal of a file submitted by hand leaves GRACE_TIME and the minute Slurm may be late.
    assert "--signal=B:USR1@660" in "\n".join(lines) and "GRACE_TIME:-600" in "\n".join(lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus=60", "--nodes=8"], ["--gpus is 60", "8 nodes × 8", "--gpus 64"]),
        (["--gpus=64", "--nodes=4"], ["--gpus is 64", "4 nodes × 8", "--nodes 8"]),
        (["--gpus=12"], ["--gpus is 12", "1 nodes × 8"]),
        (["--time=00:03:00"], ["--time 00:03:00 is 180 s", "up to 210 s", "runtime.grace_time"]),
        (["--time=soon"], ["--time is 'soon'"]),
        (["--time=1:2:3:4"], ["too many fields"]),
        (["--gpus-per-node=6"], ["parallel.tp"]),
        (["--nodes=3", "rollout.batch_size=64"], ["rollout.batch_size"]),
        (["--gpus-per-node=0"], ["--gpus-per-node is 0", "runtime.device=cpu"]),
        (["--ranks-per-node=16"], ["--ranks-per-node is 16", "8 GPUs"]),
        (["--nodes=0"], ["--nodes is 0"]),
        (["--partition=a b"], ["--partition is 'a b'"]),
        (["--sweep=/nowhere"], ["--sweep /nowhere cannot be read"]),
        (["--sweep=/nowhere", "--container-image=x"], ["do not go together"]),
        (["trainin.steps=3"], ["training.steps"]),
    ],
)
def test_job_that_cannot_run_is_refused_with_one_message(config, capsys, options, said):
    assert main(["--config", str(config), "--dry-run", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("submit: ") and len(err.strip().splitlines()) == 1
    for words in said:
        assert words in err, err


def test_missing_config_is_one_message(capsys):
    assert main(["--config", "/nowhere.yaml"]) == 2
    assert "/nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 5400), ("1:30", 90), ("01:02:03", 3723), ("2-12", 216000), ("1-01:30", 91800),
        ("1-00:00:10", 86410), ("UNLIMITED", None), ("infinite", None), ("0", None),
    ],
)  # fmt: skip
def test_slurm_times(time, expected):
    assert checks.seconds(time) == expected


def test_partition_and_its_limit():
    known = {"short": "1:00:00", "long": "infinite"}
    job = dataclasses.replace(JOB, partition="long")
    checks.check_partition(job, known)
    with pytest.raises(SubmitError, match="nosuch does not exist; sinfo knows: long, short"):
        checks.check_partition(dataclasses.replace(job, partition="long,nosuch"), known)
    with pytest.raises(SubmitError, match="longer than partition short allows"):
        checks.check_partition(dataclasses.replace(job, partition="short"), known)


def test_sweep_takes_one_line_per_job(tmp_path):
    """Quotes as in a shell; nothing else of a shell."""
    (tmp_path / "sweep").write_text(f"a=1 'b=x y'\nc=$(touch {tmp_path}/pwned) \"d='q'\"\n")
    text = (ROOT / "launch/slurm/ppo_sweep.sbatch").read_text()
    head = text[: text.index("# shellcheck source=launch/slurm/job.sh")]
    for task, words in ((1, ["a=1", "b=x y"]), (2, ["c=$(touch", f"{tmp_path}/pwned)", "d='q'"])):
        done = subprocess.run(
            ["bash", "-c", head + 'printf "%s\\n" "${OVERRIDES[@]}"'],
            env={"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": "/repo", "SLURM_ARRAY_JOB_ID": "7",
                 "SLURM_ARRAY_TASK_ID": str(task), "SWEEP_FILE": str(tmp_path / "sweep")},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.splitlines() == [f"run_dir=runs/sweep-7/{task}", *words]
    assert not (tmp_path / "pwned").exists()


def test_container_job_runs_every_step_in_the_image(config, tmp_path, capsys):
    """The rendered file under bash, with stand-ins for Slurm's commands that note what they get."""
    logs, notes = tmp_path / "my logs", tmp_path / "notes"
    options = ["--container-image=team/image:1", "--container-mounts=/data:/data,/m:/m:ro"]
    options += ["--gpus-per-node=8", f"--log-dir={logs}", "--preflight=warn"]
    assert main(["--config", str(config), "--dry-run", *options]) == 0
    script = tmp_path / "job.sbatch"
    script.write_text(capsys.readouterr().out)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, says in (("srun", ""), ("scontrol", "echo n1 NodeAddr=127.0.0.1")):
        (commands / name).write_text(
            f'#!/bin/bash\nprintf "%s\\n" {name} "$@" --- >>"{notes}"\n{says}\n'
        )
        (commands / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, cwd=tmp_path,
        env={"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "77",
             "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(ROOT), "HOME": str(tmp_path)},
    )  # fmt: skip
    calls = [call.splitlines() for call in notes.read_text().split("---\n")]
    steps = [call for call in calls if call[:1] == ["srun"]]
    assert len(steps) == 3, done.stdout + done.stderr  # nodes, their verdict, training
    for step in steps:
        assert "--container-image=team/image:1" in step
        mounts = f"--container-mounts={ROOT}:{ROOT},{logs}:{logs},/data:/data,/m:/m:ro"
        assert mounts in step and f"--container-workdir={ROOT}" in step
        assert "python" in step, "the container's interpreter"
    assert str(ROOT / "launch/worker.sh") in steps[-1] and "train_ppo.py" in steps[-1]
    assert "--rdzv-id=77" in steps[-1] and "--rdzv-endpoint=127.0.0.1:10077" in steps[-1]


def test_submit_runs_sbatch_with_the_rendered_file(config, tmp_path, monkeypatch):
    """As a command, with an sbatch that only shows its argument."""
    fake = tmp_path / "bin/sbatch"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\ncat "$1"\n')
    fake.chmod(0o755)
    logs = tmp_path / "my logs"
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/slurm/submit.py"), "--config", str(config),
         f"--log-dir={logs}", "training.steps=7"],
        env={"PATH": f"{fake.parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"CONFIG={shlex.quote(str(config))}\n" in done.stdout
    assert "OVERRIDES=(training.steps=7)\n" in done.stdout
    assert (logs / "ppo.sbatch").read_text() == done.stdout
