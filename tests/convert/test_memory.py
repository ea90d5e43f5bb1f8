"""Layer: processes. Host memory of a conversion and of starting ranks, on generated gigabytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.large_model import TWO_GB, write_large_model

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(__file__).with_name("large_model.py"))
GB = 10**9
SHARD = 500 * 10**6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = write_large_model(tmp_path_factory.mktemp("large") / "hf", TWO_GB, shard_bytes=SHARD)
    assert sum(f.stat().st_size for f in made.iterdir()) > 2 * GB
    return made


def run(*command: str) -> list[dict]:
    """The JSON lines that a program printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def test_a_conversion_holds_one_tensor(folder, tmp_path):
    middle, back = tmp_path / "m", tmp_path / "b"
    for command, source, target in (
        ("hf-to-megatron", folder, middle), ("megatron-to-hf", middle, back),
    ):  # fmt: skip
        (found,) = run(
            sys.executable, PROGRAM, "convert", command, "--from", str(source), "--to", str(target),
            "--max-shard-size", "500MB",
        )  # fmt: skip
        assert found["code"] == 0
        assert found["peak"] < SHARD + 2 * GB, f"{found['peak'] / GB:.2f} GB"
        print(f"{command}: {found['peak'] / GB:.2f} GB")
    for file in sorted(folder.glob("*.safetensors")):
        same = subprocess.run(["cmp", "--silent", str(file), str(back / file.name)])
        assert same.returncode == 0, f"{file.name} differs"


def test_a_rank_holds_its_shard(folder):
    found = run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        PROGRAM, "load", str(folder), "hf",
    )  # fmt: skip
    assert len(found) == 2
    for rank in found:
        assert rank["shard"] > GB
        assert rank["peak"] < rank["shard"] + GB, f"{rank['peak'] / GB:.2f} GB"
        print(f"peak {rank['peak'] / GB:.2f} GB, shard {rank['shard'] / GB:.2f} GB")
