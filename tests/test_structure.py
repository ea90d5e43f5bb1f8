"""Layer: pure. Dependencies point one way; no drawer, no second importer of parallel_state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_rl"
# A module may import from its own level and from those below it (a larger number).
LEVELS = {
    "trainer": 0, "generate": 0, "setup_models": 1, "setup_checkpoints": 1, "run_inputs": 1,
    "inference": 1, "inference_peers": 1, "model_inputs": 2, "surroundings": 2, "monitor": 2,
    "checkpoint": 2, "rewards": 2, "convert": 2, "rollout": 2, "engine": 3,
    "residency": 1, "frozen": 1, "rollout_phase": 1, "learners": 1,
    "generation": 4, "resharding": 4, "comm": 4, "preflight": 4, "models": 5, "algorithms": 6,
    "text": 6, "sentencepiece_text": 6, "hub": 6, "once_per_node": 6, "runtime": 6, "parallel": 6,
    "watchdog": 7, "stopping": 7, "rank_log": 7, "rendezvous": 7, "kernels": 7, "cuda_on_cpu": 7,
    "config": 7, "versions": 8, "exit_codes": 8, "processes": 8,
}  # fmt: skip
# The batch of a rollout is plain data, which the passes of the engine are about.
ALLOWED = {("engine", "rollout"), ("kernels", "kernels")}


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it is imported (not those inside functions)."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path):
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imports(path):
        if not module.startswith("megatron_rl."):
            continue
        other = module.split(".")[1]
        assert mine in LEVELS and other in LEVELS, f"{mine} or {other} has no level"
        assert LEVELS[other] >= LEVELS[mine] or (mine, other) in ALLOWED, f"{mine} → {other}"


def test_only_parallel_touches_parallel_state():
    users = {
        str(p.relative_to(PACKAGE))
        for p in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(p.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module == "megatron.core"
        and any(alias.name == "parallel_state" for alias in node.names)
    }
    assert users == {"parallel.py"}


def test_kernels_import_nothing_of_the_package():
    for path in (ROOT / "kernels").rglob("*.py"):
        if path.name != "bench.py":
            assert not any(m.startswith("megatron_rl") for m in imports(path)), path
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_drawers_and_no_eval():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        assert path.stem not in ("utils", "util", "helpers", "helper", "common", "misc"), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
