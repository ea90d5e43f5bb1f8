"""A real Slurm on this machine: munged, slurmctld and two slurmd, configured by the test.

Both nodes are this machine under two names, so a job over two nodes, a drained node and a node that
is left out are all real to Slurm.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("node1", "node2")
_HOLD_SECONDS = 4
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo")


def missing_programs() -> list[str]:
    """Slurm's programs that are not installed (Debian: apt-get install slurm-wlm munge)."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in _PROGRAMS if shutil.which(name, path=path) is None]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@dataclass
class Cluster:
    """Running daemons, and the commands to talk to them."""

    folder: Path
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Slurm's commands find this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        self._write_configuration()
        munge = self.folder / "munge"
        self._spawn("munged", "--foreground", "--force", f"--key-file={munge}/key",
                    f"--socket={munge}/socket", f"--pid-file={munge}/pid",
                    f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
        wait_until(lambda: (munge / "socket").exists(), 10, "munged does not start")
        self._spawn("slurmctld", "-D", "-c")
        for node in NODES:
            self._spawn("slurmd", "-D", "-N", node)
        wait_until(
            lambda: self.node_states() == ["idle", "idle"],
            30,
            "the nodes do not come up",
            lambda: [log.read_text()[-1500:] for log in self.folder.glob("*.log")],
        )

    def _write_configuration(self) -> None:
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "munge/key").write_bytes(os.urandom(1024))
        (self.folder / "munge/key").chmod(0o600)
        controller, *slurmd = _free_ports(1 + len(NODES))
        user, host = getpass.getuser(), socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(
            f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={self.folder}/munge/socket
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=100000,bf_interval=1
KillWait=25
SlurmdParameters=config_overrides
PartitionName=debug Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
"""
            + "".join(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4\n"
                for node, port in zip(NODES, slurmd, strict=True)
            )
        )

    def _spawn(self, program: str, *arguments: str) -> None:
        path = shutil.which(program) or f"/usr/sbin/{program}"
        with (self.folder / f"{program}.out").open("ab") as output:
            process = subprocess.Popen(
                [path, *arguments], env=self.environment, stdout=output, stderr=output
            )
        self.processes.append(process)

    def stop(self) -> None:
        """Cancel what is left, end the daemons that this object started, remove the folder."""
        self.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser(), check=False)
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._end_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_leftovers(self) -> None:
        """Steps of a failed test outlive the daemons; their environment names this folder."""
        mark = f"SLURM_CONF={self.folder}/".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environment.read_bytes():
                    os.kill(int(environment.parent.name), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                continue

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(
            command,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode:
            raise AssertionError(f"{command} failed: {done.stderr}{done.stdout}")
        return done.stdout.strip()

    def node_states(self) -> list[str]:
        """State of each node, as sinfo shows it."""
        return self.run("sinfo", "-N", "-h", "-o", "%T", check=False).split()

    def job(self, job_id: str) -> dict[str, str]:
        """`scontrol show job` as a dictionary."""
        words = self.run("scontrol", "show", "job", job_id, "-o").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job_id: str, states: set[str], seconds: float = 90) -> dict[str, str]:
        """Wait until the job is in one of `states`; a requeued job is not left waiting."""
        held_since: list[float] = []

        def reached() -> bool:
            job = self.job(job_id)
            # Slurm holds a requeued job back for two minutes, so that what is left of the attempt
            # before can end. Here a few seconds do.
            if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
                held_since.append(time.monotonic())
                if held_since[-1] - held_since[0] > _HOLD_SECONDS:
                    self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now", check=False)
            return job["JobState"] in states

        wait_until(
            reached, seconds, f"job {job_id} does not reach {states}", lambda: self.job(job_id)
        )
        return self.job(job_id)


def wait_until(
    reached: Callable[[], bool],
    seconds: float,
    message: str,
    detail: Callable[[], object] = lambda: "",
) -> None:
    """Poll until `reached` or fail with `message`."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise AssertionError(f"{message} within {seconds} s: {detail()}")
        time.sleep(0.3)


def start_cluster() -> Cluster:
    """A started cluster. Its folder is short: munge's socket has a path limit of 108 bytes."""
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster
