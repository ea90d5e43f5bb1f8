"""Traces of chosen steps on chosen ranks, by torch's profiler (`monitor.profile`)."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.config.operation import ProfileSettings


class StepProfiler:
    """Writes `profile/step_<n>_rank_<r>.json.gz`: a Chrome trace (chrome://tracing, Perfetto) with
    our phases as ranges."""

    def __init__(self, settings: ProfileSettings, folder: Path, rank: int) -> None:
        self._steps = set(settings.steps) if rank in settings.ranks else set()
        self._folder, self._rank = folder, rank
        self._profile: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Starts the trace of `step`, if it is one of the chosen."""
        if step not in self._steps:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def end(self, step: int) -> Path | None:
        """Writes the trace that `begin` started; returns its file."""
        if self._profile is None:
            return None
        profile, self._profile = self._profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step:05d}_rank_{self._rank:05d}.json.gz"
        profile.export_chrome_trace(str(path))
        return path
