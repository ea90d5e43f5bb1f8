"""Layer: pure, and one GPU. Busy share and power between two looks."""

from __future__ import annotations

import math
import sys
import time
import types

import pytest
import torch

from megatron_rl.monitor.hardware import HardwareMeter


def test_busy_share_of_a_cpu_is_work_per_second_and_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    meter = HardwareMeter(torch.device("cpu"))
    clock, work = time.monotonic, time.process_time
    start, used = clock(), work()
    monkeypatch.setattr(time, "monotonic", lambda: start + 10.0)
    monkeypatch.setattr(time, "process_time", lambda: used + 5.0)
    busy, watts = meter.take()
    assert busy == pytest.approx(5.0 / 10.0 / 2, rel=0.05) and math.isnan(watts)


class FakeNvml(types.ModuleType):
    """NVML as its package offers it: samples with time stamps, energy in millijoules."""

    NVML_GPU_UTILIZATION_SAMPLES, NVML_VALUE_TYPE_DOUBLE = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.samples, self.millijoules, self.broken = [(1, 10), (2, 20)], 5000, False

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        assert uuid == b"GPU-1234"
        return "handle"

    def nvmlDeviceGetSamples(self, handle: str, kind: int, since: int):
        found = [s for s in self.samples if s[0] > since]
        if not found or self.broken:
            raise self.NVMLError("not found")
        value = types.SimpleNamespace
        return 1, [value(timeStamp=t, sampleValue=value(uiVal=v)) for t, v in found]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return fake


def test_gpu_is_asked_for_what_happened_since_the_last_look(nvml, monkeypatch):
    meter = HardwareMeter(torch.device("cuda", 1))
    nvml.samples += [(3, 50), (4, 100)]
    nvml.millijoules += 600_000
    before = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: before + 2.0)
    busy, watts = meter.take()
    assert busy == pytest.approx(0.75) and watts == pytest.approx(300.0, rel=0.02)
    busy, _ = meter.take()
    assert math.isnan(busy), "no new samples"


@pytest.mark.parametrize("reason", ["no driver", "no package"])
def test_without_nvml_nothing_is_known_and_nothing_fails(nvml, monkeypatch, reason):
    nvml.broken = True
    if reason == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    assert all(math.isnan(x) for x in HardwareMeter(torch.device("cuda", 1)).take())


@pytest.mark.gpu
def test_real_gpu_is_busy_and_draws_power():
    pytest.importorskip("pynvml")
    meter = HardwareMeter(torch.device("cuda"))
    matrix, start = torch.randn(8192, 8192, device="cuda"), time.monotonic()
    while time.monotonic() - start < 3:
        matrix @ matrix
        torch.cuda.synchronize()
    busy, watts = meter.take()
    assert 0.5 < busy <= 1.0 and 50 < watts < 1500
