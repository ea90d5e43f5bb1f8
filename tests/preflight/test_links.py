"""Measuring links. Layer: gloo ranks on this machine, with a slow link that is really slow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.parallel import Layout
from megatron_rl.preflight import links
from megatron_rl.preflight.facts import Machine
from megatron_rl.preflight.report import Status

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def measure_on_pretended_hosts(rank: int, world_size: int, hosts: list[str], tp: int):
    """The report of every rank, ranks pretending to be on `hosts`."""
    layout = Layout(world_size=world_size, tp=tp)
    return links.measure(layout, Machine(host=hosts[rank]), CPU, min_gbps=None)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("hosts", "tp", "said"),
    [
        (
            ["a", "a", "b", "b"],
            2,
            ["2 links inside hosts", "2 links between hosts", "over tp", "over dp"],
        ),
        (["a", "b", "c"], 1, ["3 links between hosts", "over world", "clock"]),
    ],
)
def test_all_ranks_get_the_same_report(ranks, hosts, tp, said):
    reports = ranks(len(hosts), measure_on_pretended_hosts, hosts, tp)
    assert all(report == reports[0] for report in reports)
    text = " | ".join(f"{f.check}: {f.message}" for f in reports[0].findings)
    for words in said:
        assert words in text


def measure_with_a_slow_rank(rank: int, world_size: int, slow: int):
    """As above, but whatever goes to or from rank `slow` takes half a second longer."""
    import time

    send = torch.distributed.send

    def late_send(tensor, peer):
        if slow in (rank, peer) and tensor.numel() > 1:
            time.sleep(0.5)
        return send(tensor, peer)

    torch.distributed.send = late_send
    try:
        hosts = [f"host{i}" for i in range(world_size)]
        return measure_on_pretended_hosts(rank, world_size, hosts, 1)
    finally:
        torch.distributed.send = send


@pytest.mark.ranks
def test_slow_host_is_named(ranks):
    report = ranks(4, measure_with_a_slow_rank, 2)[0]
    slow = [f for f in report.findings if f.check == "links"]
    assert [f.status for f in slow] == [Status.WARN]
    assert "every link of host host2 is slow" in slow[0].message


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Three network namespaces on one bridge; the last one is shaped to 50 Mbit/s."""
    if os.geteuid() != 0 or not shutil.which("tc"):
        pytest.skip("needs root and iproute2 to make a slow link")
    tag = f"p{os.getpid() % 10000}"
    names, bridge = [f"{tag}n{i}" for i in range(3)], f"{tag}br"
    try:
        _ip("link", "add", bridge, "type", "bridge")
    except subprocess.CalledProcessError:
        pytest.skip("the kernel does not allow network devices here")
    try:
        _ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("link", "add", f"{tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{tag}v{i}", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.231.7.{i + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        subprocess.run(
            ["tc", "-n", names[2], "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "50mbit",
             "burst", "64kb", "latency", "200ms"],
            check=True, capture_output=True,
        )  # fmt: skip
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        _ip("link", "delete", bridge)


@pytest.mark.ranks
@pytest.mark.slow
def test_shaped_interface_is_found_by_the_command(namespaces):
    """Three hosts' worth of network; `unshare --uts` gives each its own name."""
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c",
             f'hostname host{rank}; exec "$0" -m megatron_rl.preflight --json', sys.executable],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0",
                 "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.231.7.1", "MASTER_PORT": "29517",
                 "GLOO_SOCKET_IFNAME": "eth0"},
        )
        for rank, name in enumerate(namespaces)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1], outputs
    report = json.loads(outputs[0][0])
    slow = [f for f in report["findings"] if f["check"] == "links" and f["status"] == "fail"]
    assert len(slow) == 1, report
    assert "every link of host host2 is slow" in slow[0]["message"]
    assert "--exclude=host2" in slow[0]["fix"]
