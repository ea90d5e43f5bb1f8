"""Settings of checkpoints, monitoring, the processes and the communication trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .schema import SECTION, section, setting


@dataclass(**SECTION)
class CheckpointSettings:
    """Saving and resuming."""

    dir: str | None = setting(None)
    """Folder of the checkpoints; null: run_dir/checkpoints."""
    save_interval: int | None = setting(None, at_least=1)
    """Save every this many steps and after the last; null: only when stopped by a signal."""
    format: Literal["torch_dist"] = setting("torch_dist")
    """Format on disk: Megatron-Core's distributed checkpoint."""
    keep_last: int = setting(2, at_least=1)
    """Newest checkpoints to keep."""
    keep_every: int | None = setting(None, at_least=1)
    """Keep the checkpoints of steps divisible by this for good; null: none."""
    best_metric: str | None = setting(None)
    """Also keep the checkpoint with the largest value of this metric; null: none."""
    async_save: bool = setting(False)
    """Write while training goes on."""
    resume: str = setting("auto", form=(r".+", "auto, never or the folder of a checkpoint"))
    """auto: from the newest checkpoint in dir if there is one; never; or a checkpoint's folder."""
    on_corrupt: Literal["fail", "previous"] = setting("fail")
    """A damaged checkpoint ends the run, or the one before it is used."""
    export_huggingface: bool = setting(False)
    """Write the actor as a Hugging Face folder at the end of the run."""


@dataclass(**SECTION)
class ProfileSettings:
    """Profiler traces."""

    steps: list[int] = setting([], at_least=1)
    """Steps to trace; the first step is 1."""
    ranks: list[int] = setting([0], at_least=0)
    """Ranks that write a trace."""


@dataclass(**SECTION)
class AlertSettings:
    """Warnings when a run shows a known disease. A limit of null switches its alert off."""

    enable: bool = setting(True)
    """Watch the metrics and warn in the log."""
    window: int = setting(10, at_least=1)
    """Steps over which a metric is averaged; as many at the start are what it is compared with."""
    kl: float | None = setting(1.0, above=0)
    """Largest KL from the reference, nats per token."""
    update_kl: float | None = setting(0.2, above=0)
    """Largest KL (k3) between the policy before and after a step's update, nats per token."""
    entropy_share: float | None = setting(0.2, above=0, below=1)
    """Smallest entropy as a share of that of the first steps."""
    clipfrac: float | None = setting(0.3, above=0, below=1)
    """Largest share of tokens where the clip is active."""
    length_growth: float | None = setting(2.0, above=1)
    """Largest mean response length as a multiple of that of the first steps."""
    explained_variance: float | None = setting(0.0, at_most=1)
    """Smallest explained variance of the critic, once it had two windows to learn."""
    drift: float | None = setting(0.05, above=0)
    """Largest mean difference between generation and training log-probs of the same weights."""
    straggler_share: float | None = setting(0.1, above=0, below=1)
    """Largest share of every step for which the others wait for one and the same rank."""


@dataclass(**SECTION)
class MonitorSettings:
    """What is shown and written during a run."""

    tensorboard: bool = setting(True)
    """Write TensorBoard files to run_dir/tensorboard."""
    console: bool = setting(True)
    """Show one line per step and a progress bar in the terminal."""
    samples_per_step: int = setting(4, at_least=0)
    """Responses per step that are written with their rewards."""
    preflight: Literal["warn", "fail", "off"] = setting("warn")
    """Checks of the machine before the run: report failures, end on them, or skip them."""
    min_link_gbps: float | None = setting(None, above=0)
    """Slowest acceptable link between ranks in Gbit/s when its nominal speed is unknown."""
    wandb: bool = setting(False)
    """Mirror the metrics to Weights & Biases; its WANDB_* variables say where."""
    report: bool = setting(True)
    """Write run_dir/report.html at the end of the run."""
    peak_tflops: float | None = setting(None, above=0)
    """Peak TFLOP/s of one device for the MFU; null: from the data sheets of known GPUs."""
    alerts: AlertSettings = section(AlertSettings)
    """Warnings when a run shows a known disease."""
    profile: ProfileSettings = section(ProfileSettings)
    """Profiler traces."""


@dataclass(**SECTION)
class RuntimeSettings:
    """Processes and devices."""

    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """auto: cuda when there is a GPU for every rank of the machine, else cpu."""
    collective_timeout: float = setting(1800.0, above=0)
    """Seconds after which a waiting collective ends the run; a reward may not take longer."""
    init_timeout: float = setting(300.0, above=0)
    """Seconds to wait for all ranks at the start."""
    heartbeat_timeout: float = setting(20.0, at_least=5.0)
    """Seconds without a sign of life after which a rank counts as dead and the run ends."""
    grace_time: float = setting(120.0, above=0)
    """Seconds between a stop signal and the end, in which a checkpoint is saved."""


@dataclass(**SECTION)
class CommTraceSettings:
    """Trace of the communication."""

    enable: bool = setting(False)
    """Record the collectives of traced steps."""
    dir: str | None = setting(None)
    """Folder of the trace; null: run_dir/comm_trace."""
    interval: int = setting(50, at_least=1)
    """Trace every this many steps."""
    record_detail: bool = setting(True)
    """Record every collective; false: sums only."""
