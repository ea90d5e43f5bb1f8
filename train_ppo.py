"""Trains a language model with reinforcement learning; see README.md.

    torchrun --nproc_per_node=2 train_ppo.py --config configs/quickstart.yaml [section.key=value …]
"""

from __future__ import annotations

import argparse
import sys

from megatron_rl.versions import exit_if_unsupported

exit_if_unsupported()

from megatron_rl import exit_codes  # noqa: E402
from megatron_rl.config import Config, ConfigError  # noqa: E402
from megatron_rl.preflight import PreflightError, run_preflight  # noqa: E402
from megatron_rl.runtime import (  # noqa: E402
    Environment,
    quiet_expected_warnings,
    run_guarded,
)
from megatron_rl.stopping import StoppedBySignal  # noqa: E402


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_ppo.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the run")
    parser.add_argument(
        "--print-config", action="store_true", help="show every setting of the run and stop"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's"
    )
    return parser.parse_args(argv)


def main() -> int:
    """Runs the command line; returns the exit code (0 done, 2 bad input, 75 requeue me)."""
    try:
        env = Environment.read()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    return run_guarded(lambda: run(parse_arguments(sys.argv[1:]), env), env)


def run(arguments: argparse.Namespace, env: Environment) -> int:
    quiet_expected_warnings()
    config = Config.load(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(config.to_yaml(with_help=True), end="")
        return exit_codes.DONE
    if env.local_rank == 0:
        try:
            failures = run_preflight(config, config.monitor.preflight).failures
        except PreflightError as error:
            raise ConfigError(f"monitor.preflight is fail: {error}") from error
        for finding in failures:
            print(f"preflight: {finding.message}; {finding.fix}", file=sys.stderr)
    if env.rank == 0:
        for warning in config.warnings():
            print(f"warning: {warning}", file=sys.stderr)
    config.validate_world(env.world_size)
    try:
        if config.place_of(env.rank, env.world_size).name in config.ranks_apart:
            from megatron_rl.frozen.service import serve_frozen_model

            serve_frozen_model(config)
        else:
            train(config, env)
        return exit_codes.DONE
    except StoppedBySignal as stop:
        print(f"rank {env.rank}: {stop}", file=sys.stderr, flush=True)
        return exit_codes.REQUEUE


def train(config: Config, env: Environment) -> None:
    from megatron_rl.trainer import Trainer

    trainer = Trainer(config)
    try:
        with trainer.runtime.failures_told():
            metrics = trainer.train()
        if env.rank == 0:
            print(summary(config, metrics), flush=True)
    finally:
        trainer.close()


def summary(config: Config, metrics: dict[str, float]) -> str:
    """What the run learned and where its results are."""
    lines = []
    start, end = (metrics.get(f"{when}/eval/reward_mean") for when in ("start", "end"))
    if end is not None:
        change = f" (before: {start:.3f}, {end - start:+.3f})" if start is not None else ""
        lines.append(f"mean reward on held-out prompts: {end:.3f}{change}")
    if config.monitor.tensorboard:
        lines.append(f"TensorBoard: tensorboard --logdir {config.run_dir}/tensorboard")
    if config.checkpoint.export_huggingface:
        lines.append(f"Hugging Face model: {config.run_dir}/huggingface")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
