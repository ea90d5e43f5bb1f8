"""The runner of GPU tests and benchmarks (small processes): nothing is left out or waited for."""

import os
import subprocess
import sys
import time
from pathlib import Path

from launch import gpu_checks
from launch.gpu_checks import PARTS, TIMED_OUT, Part, choose, run_parts, table

ROOT = Path(__file__).resolve().parents[2]


def words() -> list[str]:
    return [word for part in PARTS for word in part.arguments]


def test_every_gpu_test_and_kernel_benchmark_is_in_a_part():
    chosen = [word for word in words() if word.startswith("tests/")]
    marked = [
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path.name != Path(__file__).name
    ]  # fmt: skip
    assert marked
    for path in marked:
        assert any(path == place or path.startswith(f"{place}/") for place in chosen), path
    for path in (ROOT / "kernels").glob("*/bench.py"):
        assert f"megatron_rl.kernels.{path.parent.name}.bench" in words(), path


def test_files_and_names_exist():
    for word in words():
        if word.startswith(("tests/", "benchmarks/")):
            assert (ROOT / word).exists(), word
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(part.limit < 600 for part in PARTS), "a part fits into one call"


def python(name: str, code: str, *, seconds: int = 1, gpus: int = 0) -> Part:
    return Part(name, seconds, ("-c", code), gpus)


def outcomes(parts: list[Part], output: Path, budget: float) -> dict[str, gpu_checks.Outcome]:
    done = run_parts(parts, output, budget=budget, gpus=1, small=False, model="")
    assert "skipped" in table(done)
    return {outcome.name: outcome for outcome in done}


def test_a_failure_does_not_stop_the_others(tmp_path):
    parts = [
        python("fails", "print('why'); raise SystemExit(3)"),
        python("other", "import launch.gpu_checks; print('well'); print('-----')"),
        python("needs", "pass", gpus=2),
        python("late", "pass", seconds=1000),
    ]
    done = outcomes(parts, tmp_path, 900)
    assert (done["fails"].status, done["fails"].last_line) == (3, "why")
    assert (done["other"].status, done["other"].last_line) == (0, "well")
    assert (done["needs"].status, done["needs"].last_line) == (None, "needs 2 GPUs, there are 1")
    assert done["late"].status is None and "takes 1000 s" in done["late"].last_line


def test_a_part_that_hangs_is_ended_with_its_own_processes(tmp_path):
    hang = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(100)"
    )
    done = outcomes([python("hangs", hang), python("after", "pass")], tmp_path, 4)
    assert (done["hangs"].status, done["hangs"].last_line) == (TIMED_OUT, "begun")
    assert done["after"].status is None and "0 s are left" in done["after"].last_line
    pid, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Not gone, and not dead with nobody to fetch its status."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_exit_status_and_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_checks, "device_count", lambda: 0)
    parts = (python("good", "print(1)"), python("bad", "raise SystemExit(2)"))
    monkeypatch.setattr(gpu_checks.choose, "__defaults__", (parts,))
    assert gpu_checks.main(["--output", str(tmp_path), "good"]) == 0
    assert gpu_checks.main(["--output", str(tmp_path)]) == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert summary in capsys.readouterr().out
    assert [line.split()[:2] for line in summary.splitlines()[1:]] == [["good", "0"], ["bad", "2"]]
    assert gpu_checks.main(["--output", str(tmp_path), "--budget", "0"]) == 1, "nothing ran"


def test_patterns_choose_in_order_and_unknown_ones_are_refused():
    names = [part.name for part in choose(["generation-8b", "tests-*"])]
    assert names[0].startswith("tests-") and names[-1] == "generation-8b"
    assert choose([]) == list(PARTS)
    command = [sys.executable, "-m", "launch.gpu_checks", "--dry-run"]
    run = subprocess.run([*command, "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and "no part matches 'nothing'; there are tests-" in run.stderr
    plan = subprocess.run(
        [*command, "--budget", "100", "tests-*"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": ""},
    ).stdout.splitlines()  # fmt: skip
    assert "skipped" not in plan[0] and "skipped: takes 150 s, 10 s are left" in plan[1]
    assert len(plan) == len(choose(["tests-*"]))
