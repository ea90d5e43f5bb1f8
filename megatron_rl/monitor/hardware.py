"""How busy this rank's device is and what power it draws.

On a GPU, NVML answers (package nvidia-ml-py, used when it is installed): it samples the busy share
by itself several times a second, and counts energy, so no thread of ours has to poll. On a CPU the
busy share is the process's CPU time per thread and second.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class HardwareMeter:
    """Busy share and power of this rank's device between two calls of `take`."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = _NvmlDevice.open(device) if device.type == "cuda" else None
        self._on_cpu = device.type == "cpu"
        self._threads = max(torch.get_num_threads(), 1)
        self._seen = self._read()

    def take(self) -> tuple[float, float]:
        """(busy share in [0, 1], watts) since the last call; NaN where it can't be read."""
        before, self._seen = self._seen, self._read()
        seconds = max(self._seen[0] - before[0], 1e-9)
        watts = (self._seen[2] - before[2]) / seconds
        if self._on_cpu:
            return (self._seen[1] - before[1]) / seconds / self._threads, watts
        busy = self._gpu.busy_share() if self._gpu is not None else float("nan")
        return busy, watts

    def _read(self) -> tuple[float, float, float]:
        joules = self._gpu.joules() if self._gpu is not None else float("nan")
        return time.monotonic(), time.process_time(), joules


class _NvmlDevice:
    """One GPU as NVML sees it. Whatever NVML can't answer is NaN: monitoring never ends a run."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._last_sample = 0

    @classmethod
    def open(cls, device: torch.device) -> _NvmlDevice | None:
        """The device of a torch index, or None without NVML."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's.
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            opened = cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name.encode()))
        except pynvml.NVMLError:
            return None
        opened.busy_share()
        return opened

    def busy_share(self) -> float:
        """Mean of NVML's own samples since the last call."""
        nvml = self._nvml
        try:
            kind, samples = nvml.nvmlDeviceGetSamples(
                self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_sample
            )
        except nvml.NVMLError:
            return float("nan")
        samples = [s for s in samples if s.timeStamp > self._last_sample]
        if not samples:
            return float("nan")
        self._last_sample = max(s.timeStamp for s in samples)
        values = [
            s.sampleValue.dVal if kind == nvml.NVML_VALUE_TYPE_DOUBLE else s.sampleValue.uiVal
            for s in samples
        ]
        return sum(values) / len(values) / 100.0

    def joules(self) -> float:
        """Energy since the driver was loaded."""
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000.0
        except self._nvml.NVMLError:
            return float("nan")
