"""Layer: whole runs in processes of their own; model, tokenizer and prompts come from a hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.hub.hub_server import Hub, Repository
from tests.trainer import run_case

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def filled(server: Hub, tiny_model_dir: Path, tmp_path: Path) -> Hub:
    """A model in the branch `good` only, and a data set."""
    model = Repository.of_folder(tiny_model_dir)
    model.branches = {"main": {"config.json": b"{}"}, "good": model.branches["main"]}
    server.repositories["models/org/tiny"] = model
    prompts = run_case.write_prompts(tmp_path).read_bytes()
    data = {"train.jsonl": prompts, "test.jsonl": prompts + b"\n"}  # two blobs, not one
    server.repositories["datasets/org/prompts"] = Repository(branches={"main": data})
    return server


def write_run(folder: Path, **changes) -> Path:
    values = run_case.settings("org/tiny", folder, training__steps=1, **changes)
    values["model"]["actor"]["revision"] = "good"
    values["data"] = {"train": "org/prompts", "eval": "org/prompts/test.jsonl"}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(config: Path, rank: int, port: int, **variables: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TMPDIR": str(config.parent), **variables,
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "train_ppo.py"), "--config", str(config)]
    return subprocess.Popen(
        command, env=environment, cwd=config.parent, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def outcomes(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    try:
        errors = [process.communicate(timeout=400)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.mark.slow
def test_two_ranks_of_a_node_fetch_once(filled: Hub, tmp_path: Path, free_port: int) -> None:
    filled.slow_seconds = 0.5
    config = write_run(tmp_path)
    node = {"HF_ENDPOINT": filled.url, "HF_HOME": str(tmp_path / "home"), "LOCAL_WORLD_SIZE": "2"}
    ranks = [start(config, rank, free_port, LOCAL_RANK=str(rank), **node) for rank in range(2)]
    found = outcomes(ranks)
    assert [code for code, _ in found] == [0, 0], found
    assert {"model.safetensors", "train.jsonl", "test.jsonl"} <= set(filled.served)
    assert set(filled.served.values()) == {1}, filled.served
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


@pytest.mark.slow
def test_a_node_waits_for_one_that_still_fetches(
    filled: Hub, tmp_path: Path, free_port: int
) -> None:
    """Two nodes of one rank: the second fetches for longer than the first would wait to meet."""
    home = tmp_path / "home0" / "hub"
    for kind, name, revision in (("model", "org/tiny", "good"), ("dataset", "org/prompts", "main")):
        subprocess.run(
            [sys.executable, "-c", FETCH, name, kind, revision, str(home)], check=True,
            env=os.environ | {"HF_ENDPOINT": filled.url, "HF_HUB_OFFLINE": "0"},
        )  # fmt: skip
    filled.slow_seconds = 5.0
    config = write_run(tmp_path, runtime={"device": "cpu", "init_timeout": 2.0})
    ranks = [
        start(
            config, rank, free_port, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
            HF_ENDPOINT=filled.url, HF_HOME=str(tmp_path / f"home{rank}"),
        )
        for rank in range(2)
    ]  # fmt: skip
    found = outcomes(ranks)
    assert [code for code, _ in found] == [0, 0], found


FETCH = """
import sys
from huggingface_hub import snapshot_download
name, kind, revision, cache = sys.argv[1:]
snapshot_download(name, repo_type=kind, revision=revision, cache_dir=cache)
"""


@pytest.mark.slow
def test_a_repository_that_is_missing_ends_both_ranks_with_one_sentence(
    filled: Hub, tmp_path: Path, free_port: int
) -> None:
    filled.repositories.pop("models/org/tiny")
    config = write_run(tmp_path)
    node = {"HF_ENDPOINT": filled.url, "HF_HOME": str(tmp_path / "home"), "LOCAL_WORLD_SIZE": "2"}
    ranks = [start(config, rank, free_port, LOCAL_RANK=str(rank), **node) for rank in range(2)]
    (first, said), (second, silent) = outcomes(ranks)
    assert (first, second) == (2, 2)
    assert said.count("\n") == 1 and "org/tiny" in said and "check the name" in said
    assert not silent
