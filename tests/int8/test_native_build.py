"""Pure layer: the compiled kernels are built once per machine; torch stands in without compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.kernels import int8_allreduce as int8

ROOT = Path(__file__).resolve().parents[2]
CALL = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from megatron_rl.kernels import int8_allreduce as int8
for _ in range(2):
    print("chose", int8.select_backend("cpu").name)
"""


def start(**environment: str) -> subprocess.Popen:
    merged = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", CALL], env=merged, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_two_processes_build_one_library(tmp_path):
    counter = tmp_path / "compilations"
    compiler = tmp_path / "counting-g++"
    compiler.write_text(f'#!/bin/sh\necho run >> {counter}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    both = [start(MEGATRON_RL_KERNEL_CACHE=str(cache), CXX=str(compiler)) for _ in range(2)]
    for process in both:
        out, errors = process.communicate(timeout=200)
        assert out.splitlines() == ["chose cpp"] * 2, errors
    assert counter.read_text().splitlines() == ["run"]
    assert len(list(cache.glob("*.so"))) == 1


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_no_compiler_means_torch_and_one_line_in_the_log(tmp_path, compiler):
    process = start(MEGATRON_RL_KERNEL_CACHE=str(tmp_path), CXX=compiler)
    out, errors = process.communicate(timeout=200)
    assert out.splitlines() == ["chose torch"] * 2, errors
    lines = [line for line in errors.splitlines() if line.startswith("int8 kernels on cpu: torch")]
    assert len(lines) == 1 and "cpp: " in lines[0] and compiler in lines[0]


def test_built_ahead_is_found_without_a_compiler(tmp_path, monkeypatch):
    from megatron_rl.kernels.int8_allreduce import build, native

    built = build.build_ahead(capabilities=(), folder=tmp_path / "ahead")
    assert [path.suffix for path in built] == [".so"]
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "ahead")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("MEGATRON_RL_KERNEL_CACHE", str(tmp_path / "empty"))
    native._cpu_library.cache_clear()
    assert int8.select_backend("cpu").name == "cpp"
    assert not (tmp_path / "empty").exists()
    native._cpu_library.cache_clear()


@pytest.mark.parametrize("ahead", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_setup_builds_kernels_on_request(tmp_path, ahead):
    """What `MEGATRON_RL_BUILD_KERNELS=1 pip install .` runs; the digest in the name is the key."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)], cwd=ROOT,
        env={**os.environ, "MEGATRON_RL_BUILD_KERNELS": ahead}, check=True, capture_output=True,
    )  # fmt: skip
    folder = tmp_path / "megatron_rl" / "kernels" / "int8_allreduce"
    assert (folder / "build.py").exists() and (folder / "csrc" / "int8_cpu.cpp").exists()
    assert len(list(folder.glob("prebuilt/int8_cpu_*.so"))) == int(ahead)
