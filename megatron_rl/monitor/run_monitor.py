"""What a run knows and shows about itself: one object that the trainer tells where it is.

Shapes: B samples of this replica.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.models.architecture import Architecture
from megatron_rl.monitor.flops import (
    Workload,
    peak_flops,
    phase_flops,
    phase_tokens,
    throughput_metrics,
)
from megatron_rl.monitor.hardware import HardwareMeter
from megatron_rl.monitor.over_ranks import gather_table, rank_metrics, slowest_seconds
from megatron_rl.monitor.phases import PhaseTimer
from megatron_rl.monitor.profiling import StepProfiler
from megatron_rl.monitor.run_folder import describe_run, this_place
from megatron_rl.monitor.summary import Updates, learning_metrics, rollout_metrics
from megatron_rl.monitor.writers import StepRecord, Writers
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.runtime import log
from megatron_rl.stopping import StoppedBySignal


class RunMonitor:
    """Measures steps on every rank, and writes on rank 0.

    Args:
        timer: the phases of the run.
        first_step: steps already done.
    """

    def __init__(
        self, config: Config, architectures: dict[str, Architecture], groups: ParallelGroups,
        timer: PhaseTimer, *, first_step: int,
    ) -> None:  # fmt: skip
        self.config, self.architectures, self.groups = config, architectures, groups
        self.timer, self.device = timer, timer.device
        self.first_step = first_step
        self.folder = Path(config.run_dir)
        self.hardware = HardwareMeter(self.device)
        self.profiler = StepProfiler(
            config.monitor.profile, self.folder / "profile", dist.get_rank()
        )
        self.peak = _peak(config, self.device)
        self.started = self.step_started = time.monotonic()
        self.writers: Writers | None = None
        places = [None] * dist.get_world_size()
        dist.all_gather_object(places, this_place(self.device))
        if dist.get_rank() == 0:
            layout = groups.layout
            described = {"places": places, "tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
            describe_run(config, self.folder, first_step=first_step, ranks=described)
            self.writers = Writers(config, total_steps=config.training.steps, first_step=first_step)
            timer.on_enter = self.writers.phase

    def begin_step(self, step: int) -> None:
        """Step `step` (the first is 1) begins."""
        self.profiler.begin(step)
        self.step_started = time.monotonic()

    def end_step(
        self, step: int, batch: RolloutBatch, updates: Updates, *, kl_coef: float,
        more: Mapping[str, float],
    ) -> dict[str, float]:  # fmt: skip
        """Brings the step's numbers together and writes them; a collective over all ranks.

        Args:
            more: further metrics of this step under their public names.

        Returns:
            The metrics, equal on all ranks.
        """
        metrics, work = rollout_metrics(batch, self.groups)
        metrics |= learning_metrics(updates, kl_coef=kl_coef) | more
        metrics |= self._performance(step, work)
        scores_B, lengths_B = self._of_all_replicas(batch)
        if self.writers is not None:
            sums = updates["actor"][1] if "actor" in updates else {}
            count = min(self.config.monitor.samples_per_step, len(batch))
            samples = [
                {
                    "prompt": batch.prompts[i].text, "response": batch.texts[i],
                    "reward": float(batch.scores_B[i]),
                }
                for i in range(count)
            ]  # fmt: skip
            self.writers.step(
                StepRecord(
                    step=step, metrics=metrics, samples=samples,
                    ratio_counts=sums.get("ratio_hist"),
                    histograms={
                        "distribution/reward": torch.from_numpy(scores_B),
                        "distribution/length": torch.from_numpy(lengths_B),
                    },
                )
            )  # fmt: skip
        self.profiler.end(step)  # writing a trace takes seconds that are not the step's
        return metrics

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation after `step` steps."""
        if self.writers is not None:
            self.writers.evaluation(step, metrics)

    def finish(self) -> None:
        """The run is complete: writes the report. A trained run does not fail for want of it."""
        if self.writers is not None and self.config.monitor.report:
            from megatron_rl.monitor.report import PlotlyMissingError, write_report

            try:
                self.writers.note(f"report: {write_report(self.folder)}")
            except PlotlyMissingError as missing:
                log.warning("%s", missing)

    def close(self) -> None:
        """Closes all files; safe to call twice."""
        if self.writers is not None:
            failed = sys.exc_info()[0] not in (None, StoppedBySignal)
            self.writers.close(failed=failed)
            self.writers = None
            self.timer.on_enter = None

    def _performance(self, step: int, work: Workload) -> dict[str, float]:
        now = time.monotonic()
        busy, watts = self.hardware.take()
        extra = {"busy_share": busy, "watts": watts, "elapsed": now - self.step_started}
        extra["eta"] = self._seconds_left(step, now)
        table = gather_table(self.timer.take(), extra, self.device)
        seconds = float(table.extra["elapsed"].max())
        epochs = self.config.training.epochs
        metrics = {
            "perf/step_seconds": seconds, "perf/tokens_per_second": work.tokens / seconds,
            "perf/eta_seconds": float(table.extra["eta"][0]),
        }  # fmt: skip
        metrics |= throughput_metrics(
            slowest_seconds(table), phase_flops(self.architectures, work, epochs),
            phase_tokens(work, epochs), step_seconds=seconds, ranks=dist.get_world_size(),
            peak=self.peak,
        )  # fmt: skip
        return metrics | rank_metrics(table, on_gpu=self.device.type == "cuda")

    def _seconds_left(self, step: int, now: float) -> float:
        """To the end of the run, at the pace of this attempt so far."""
        done = max(step - self.first_step, 1)
        return (now - self.started) / done * (self.config.training.steps - step)

    def _of_all_replicas(self, batch: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
        """Scores and response lengths of every sample of the step."""
        group = self.groups.data_control()
        parts: list = [None] * group.size()
        mine = np.stack((batch.scores_B.numpy(), batch.length_B.numpy())).astype(np.float32)
        dist.all_gather_object(parts, mine, group=group)
        together = np.concatenate(parts, axis=1)
        return together[0], together[1]


def _peak(config: Config, device: torch.device) -> float | None:
    """Operations per second of one device at best."""
    if config.monitor.peak_tflops is not None:
        return config.monitor.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), config.training.dtype)
