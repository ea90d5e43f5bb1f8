"""Jobs on a real Slurm: submit, stop, requeue, resume, cancel, fail, drain.

Layer: real slurmctld and slurmd, real torchrun, gloo ranks; the trainer is `counting_run.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron_rl.rendezvous import first_node
from tests.slurm.cluster import wait_until
from tests.slurm.submitted_run import ROOT, Run

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_time_limit_requeues_and_resumes_with_the_exact_step(run, cluster):
    run.submit(steps=100_000)
    run.wait_for_step(3)
    # The job is told to stop 100 s (10 s grace and 90 s of margins) before its time limit.
    minutes = int(cluster.job(run.job_id)["RunTime"].split(":")[1])
    cluster.run("scontrol", "update", f"JobId={run.job_id}", f"TimeLimit={minutes + 2}")
    job = run.wait("PENDING", seconds=240)
    assert job["Restarts"] == "1"
    stopped_after = len(run.steps)
    cluster.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=10")
    run.wait("RUNNING")
    run.wait_for_step(stopped_after + 3)
    (run.folder / "run/enough").touch()
    job = run.wait()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), run.log
    assert run.steps == list(range(1, len(run.steps) + 1))
    assert "stop asked for" in run.log
    logs = run.folder / f"logs/{run.job_id}"
    first, second = (sorted(p.name for p in logs.glob(f"attempt-{n}/rank-*.log")) for n in (0, 1))
    assert first == second == ["rank-0000.log", "rank-0001.log"]
    resumed = (logs / "attempt-1/rank-0001.log").read_text()
    assert f"starts after step {stopped_after}" in resumed


def test_drained_node_is_left_at_the_next_attempt(run, cluster):
    run.submit(steps=30)
    run.wait_for_step(3)
    node = cluster.job(run.job_id)["NodeList"]
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        cluster.run("scancel", "--batch", "--signal=USR1", run.job_id)
        job = run.wait()
        assert job["JobState"] == "COMPLETED", run.log
        assert job["NodeList"] != node
        assert job["Restarts"] == "1"
        assert run.steps == list(range(1, 31))
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def test_scancel_saves_and_does_not_requeue(run):
    run.submit(steps=500)
    run.wait_for_step(3)
    run.cluster.run("scancel", run.job_id)
    job = run.wait()
    assert job["JobState"] == "CANCELLED"
    wait_until(lambda: "left to Slurm" in run.log, 20, "the job's last word", lambda: run.log)
    assert int((run.folder / "run/checkpoint.txt").read_text()) == run.steps[-1]
    assert "requeueing" not in run.log


def test_failing_rank_fails_the_job_with_its_message(run):
    run.submit("--max-restarts=0", steps=50, FAIL_AT="1:4")
    job = run.wait()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0"), run.log
    assert "rank-0001 on node1 failed first, exit code 1" in run.log
    assert re.search(r"\[rank-0001\] .*planned failure of rank 1 at step 4", run.log)


def test_crashed_rank_is_restarted_and_resumes_from_the_checkpoint(run):
    run.submit("--max-restarts=1", steps=12, FAIL_AT="1:8", FAIL_ONCE="1")
    job = run.wait()
    assert job["JobState"] == "COMPLETED", run.log
    assert job["Restarts"] == "0"
    # Steps 6 and 7 came after the checkpoint of step 5 and are done again.
    assert run.steps == [*range(1, 8), *range(6, 13)]
    log = (run.folder / f"logs/{run.job_id}/attempt-0/rank-0001.log").read_text()
    assert "--- restart 1" in log


def test_two_jobs_on_one_node_do_not_meet(run, cluster, tmp_path_factory):
    other = Run(cluster, tmp_path_factory.mktemp("other"))
    cluster.run("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=test")
    try:
        run.submit(steps=25)
        other.submit(steps=25)
        jobs = [run.wait(), other.wait()]
    finally:
        cluster.run("scontrol", "update", "NodeName=node2", "State=RESUME")
    assert [(job["JobState"], job["NodeList"]) for job in jobs] == [("COMPLETED", "node1")] * 2
    assert jobs[1]["StartTime"] < jobs[0]["EndTime"], "they did not run at the same time"
    assert run.steps == other.steps == list(range(1, 26))


def test_two_nodes_with_one_torchrun_each_and_measured_links(run):
    run.submit("--nodes=2", "--ranks-per-node=1", "--cpus-per-node=1", steps=5)
    job = run.wait()
    assert job["JobState"] == "COMPLETED", run.log
    assert job["NumNodes"] == "2"
    assert run.steps == list(range(1, 6))
    assert "all-reduce over world" in run.log
    assert "2 nodes passed" in run.log


def test_srun_with_one_task_per_rank_and_no_torchrun(run):
    run.submit("--launcher=srun", steps=30)
    run.wait_for_step(3)
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job_id)
    job = run.wait()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), run.log
    assert run.steps == list(range(1, 31))


def test_bare_srun_over_two_nodes_meets_by_slurms_variables_alone(run, cluster):
    """No torchrun, none of our scripts, no MASTER_ADDR: srun and the program."""
    run.write_config(steps=4)
    (run.folder / "logs").mkdir()
    python = f"'{sys.executable}' '{ROOT}/tests/slurm/counting_run.py' --config '{run.config}'"
    output = cluster.run(
        "sbatch", "--nodes=2", "--ntasks-per-node=2", "--time=5", f"--chdir={ROOT}",
        f"--output={run.folder}/logs/%j.out", f"--wrap=srun --ntasks=4 {python}",
        PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1",
    )  # fmt: skip
    run.job_id = output.split()[-1]
    job = run.wait()
    assert job["JobState"] == "COMPLETED", run.log
    assert run.steps == list(range(1, 5))
    assert all(f"rank {rank} of 4 starts" in run.log for rank in range(4))


def test_names_of_nodes_are_read_as_slurm_reads_them(cluster):
    for nodes in ("node[1-2]", "gpu[03-07,9]", "rack[1-2]-n[04-08],x", "a,b[1-2]"):
        expanded = cluster.run("scontrol", "show", "hostnames", nodes).split()
        assert first_node(nodes) == expanded[0]


def test_bad_node_is_named_and_the_job_runs_without_it(run, tmp_path):
    """On node2 Gloo is told to use an interface that does not exist there."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\n[ "${SLURMD_NODENAME:-}" = node2 ] && export GLOO_SOCKET_IFNAME=nosuch0\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    both = ("--nodes=2", "--ranks-per-node=1", "--cpus-per-node=1", f"--python={python}")
    run.submit(*both, steps=4)
    job = run.wait()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0"), run.log
    assert "GLOO_SOCKET_IFNAME=nosuch0" in run.log
    assert "sbatch --exclude=node2" in run.log
    assert run.steps == []
    run.submit("--exclude=node2", f"--python={python}", steps=4)
    assert run.wait()["JobState"] == "COMPLETED", run.log


def test_wrong_setting_in_the_job_ends_it_with_one_message(run, cluster):
    """The template submitted by hand, past submit.py's checks."""
    run.write_config(steps=4)
    run.config.write_text(run.config.read_text().replace("steps:", "stepps:"))
    (run.folder / "logs").mkdir()  # submit.py does it otherwise; Slurm makes no folder
    output = cluster.run(
        "sbatch", "--gpus-per-node=0", "--cpus-per-task=1", "--time=5",
        f"--output={run.folder}/logs/%j.out", f"--chdir={ROOT}", "launch/slurm/ppo.sbatch",
        REPO=str(ROOT), CONFIG=str(run.config), LOG_DIR=str(run.folder / "logs"),
        RANKS_PER_NODE="2", PYTHON=sys.executable,
    )  # fmt: skip
    run.job_id = output.split()[-1]
    job = run.wait()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0"), run.log
    assert run.log.count("stepps") == 1
    assert "Traceback" not in run.log


def test_submit_refuses_a_partition_that_sinfo_does_not_know(run):
    run.write_config(steps=4)
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/slurm/submit.py"), "--config", str(run.config),
         "--partition=nosuch"],
        env=run.cluster.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "submit: --partition nosuch does not exist; sinfo knows: debug"
    ]
    run.job_id = ""
