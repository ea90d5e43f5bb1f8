#!/usr/bin/env python3
"""Render an sbatch file for a configuration, check it, and submit it.

    python launch/slurm/submit.py --config configs/example_70b.yaml --nodes 8 training.steps=200
    python launch/slurm/submit.py --config FILE --dry-run        # print it, submit nothing

Exit code: 0 submitted, 2 the job cannot run as asked (one message), other: sbatch's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))

from launch.slurm import checks  # noqa: E402
from launch.slurm.render import Job, SubmitError, render  # noqa: E402
from megatron_rl.config import Config  # noqa: E402

# The job waits this much longer than the trainer takes, and Slurm may signal a minute late.
_GRACE_MARGIN, _SIGNAL_MARGIN = 30, 60


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help="the run's YAML file")
    add("--dry-run", action="store_true", help="print the sbatch file and submit nothing")
    add("--job-name", default="ppo")
    add("--nodes", type=int, help="default: --gpus / --gpus-per-node, or 1")
    add("--gpus-per-node", type=int, help="default 8; 0 with runtime.device=cpu")
    add("--gpus", type=int, help="all GPUs together, when that is easier to say")
    add("--ranks-per-node", type=int, help="default: one per GPU")
    add("--cpus-per-node", type=int, help="default: 8 per rank")
    add("--time", default="24:00:00", help="time limit; the job is requeued and resumes")
    add("--partition")
    add("--account")
    add("--qos")
    add("--exclude", help="nodes to leave out, e.g. those the preflight named")
    add("--constraint")
    add("--launcher", choices=("torchrun", "srun"), default="torchrun")
    add("--sweep", type=Path, help="a file with one line of overrides per job of an array")
    add("--container-image", help="run in this image (pyxis and enroot)")
    add("--container-mounts", default="", help="further mounts, /host:/container,...")
    add("--preflight", choices=("fail", "warn", "off"), default="fail")
    add("--max-restarts", type=int, default=1, help="of crashed ranks inside one attempt")
    add("--max-requeues", type=int, default=100)
    add("--log-dir", type=Path, default=REPO / "runs" / "slurm")
    add("--python", help="interpreter on the nodes; default: this one, in a container python")
    add("--train-script", default="train_ppo.py")
    add("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args(arguments)


def make_job(options: argparse.Namespace, config: Config) -> Job:
    """The job that `options` and `config` describe, checked as far as no cluster is needed.

    Raises:
        SubmitError, ConfigError: it cannot run as asked.
    """
    on_cpu = config.runtime.device == "cpu"
    gpus_per_node = options.gpus_per_node
    if gpus_per_node is None:
        gpus_per_node = 0 if on_cpu else 8
    nodes = options.nodes
    if nodes is None:
        nodes = max(1, (options.gpus or 0) // gpus_per_node) if gpus_per_node else 1
    if nodes < 1 or gpus_per_node < 0:
        raise SubmitError(
            f"--nodes is {nodes} and --gpus-per-node {gpus_per_node}: both must be positive "
            "(--gpus-per-node 0 only with runtime.device=cpu)"
        )
    checks.check_gpus(options.gpus, nodes, gpus_per_node)
    if gpus_per_node == 0 and not on_cpu:
        raise SubmitError(
            "--gpus-per-node is 0: set runtime.device=cpu to train without GPUs, or ask for some"
        )
    ranks = options.ranks_per_node or gpus_per_node or 1
    if not on_cpu and ranks > gpus_per_node:
        raise SubmitError(
            f"--ranks-per-node is {ranks} with {gpus_per_node} GPUs per node: every rank needs one"
        )
    config.validate_world(nodes * ranks)
    grace = int(config.runtime.grace_time) + _GRACE_MARGIN
    template = _template(options, nodes)
    sweep_lines = _sweep_lines(options.sweep) if options.sweep else 0
    job = Job(
        template=template,
        name=options.job_name,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks,
        cpus_per_node=options.cpus_per_node or 8 * ranks,
        time=options.time,
        output=str(options.log_dir.resolve() / ("%A_%a.out" if sweep_lines else "%j.out")),
        signal_seconds=grace + _SIGNAL_MARGIN,
        launcher=options.launcher,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        exclude=options.exclude,
        constraint=options.constraint,
        array=f"1-{sweep_lines}" if sweep_lines else None,
        settings=_settings(options, nodes, ranks, grace),
    )
    checks.check_time(job, config.runtime.grace_time)
    return job


def _template(options: argparse.Namespace, nodes: int) -> str:
    if options.sweep and options.container_image:
        raise SubmitError("--sweep and --container-image do not go together: give one of them")
    if options.sweep:
        return "ppo_sweep.sbatch"
    if options.container_image:
        return "ppo_container.sbatch"
    return "ppo_multinode.sbatch" if nodes > 1 else "ppo.sbatch"


def _settings(
    options: argparse.Namespace, nodes: int, ranks: int, grace: int
) -> dict[str, str | list[str]]:
    settings: dict[str, str | list[str]] = {
        "REPO": str(REPO),
        "PYTHON": options.python or ("python" if options.container_image else sys.executable),
        "CONFIG": str(options.config.resolve()),
        "OVERRIDES": list(options.overrides),
        "LOG_DIR": str(options.log_dir.resolve()),
        "RANKS_PER_NODE": str(ranks),
        "LAUNCHER": options.launcher,
        "GRACE_TIME": str(grace),
        "MAX_RESTARTS": str(options.max_restarts),
        "MAX_REQUEUES": str(options.max_requeues),
        "PREFLIGHT": options.preflight,
        "PREFLIGHT_LINKS": "1" if nodes > 1 else "0",
        "TRAIN_SCRIPT": options.train_script,
    }
    if options.container_image:
        settings["CONTAINER_IMAGE"] = options.container_image
        settings["CONTAINER_MOUNTS"] = options.container_mounts
    if options.sweep:
        settings["SWEEP_FILE"] = str(options.sweep.resolve())
    return settings


def _sweep_lines(path: Path) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SubmitError(f"--sweep {path} cannot be read: {error.strerror}") from error
    if not lines or not all(line.strip() for line in lines):
        raise SubmitError(f"--sweep {path}: every line must hold the overrides of one job")
    return len(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    try:
        job = make_job(options, Config.load(options.config, options.overrides))
        if (known := checks.partitions()) is not None:
            checks.check_partition(job, known)
        text = render(job)
    except (ValueError, OSError) as error:
        print(f"submit: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(text, end="")
        return 0
    options.log_dir.mkdir(parents=True, exist_ok=True)
    # Kept beside the logs: it says what was asked for, and can be submitted again.
    file = options.log_dir / f"{options.job_name}.sbatch"
    file.write_text(text, encoding="utf-8")
    return subprocess.run(["sbatch", str(file)]).returncode


if __name__ == "__main__":
    sys.exit(main())
