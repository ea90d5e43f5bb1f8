""".ci/run: every stage runs, a failure of any is a failure, an empty stage is not."""

import re

import pytest


@pytest.fixture
def ci(checkout):
    """A checkout whose .venv exists, with a linter that passes and no right to install anything."""
    checkout.run("launch/test.sh")
    checkout.calls()
    checkout.executable(checkout.folder / ".venv/bin/ruff", "#!/bin/bash\nexit ${RUFF_STATUS:-0}\n")
    checkout.program("shellcheck", "#!/bin/bash\n")
    return checkout


def summary(result) -> dict[str, str]:
    lines = result.stdout.split("===== summary =====\n")[1].splitlines()
    return {line.split()[0]: line for line in lines[:-1]}


def test_ci_is_green_when_no_slow_test_exists(ci):
    result = ci.run(".ci/run")
    assert result.returncode == 0, result.stdout
    assert result.stdout.rstrip().endswith("===== 3 passed in 1.00s =====")
    stages = summary(result)
    assert list(stages) == ["lint", "fast", "peers", "slow", "slurm", "browser"]
    assert "3 passed" in stages["fast"] and "no such test" in stages["slurm"]


def test_ci_runs_each_kind_of_test_where_it_exists(ci):
    result = ci.run(".ci/run", COLLECT_STATUS="0")
    assert result.returncode == 0
    ran = [call for call in ci.calls() if "pytest" in call and "collect-only" not in call]
    selections = [call.removesuffix(" ").rpartition(" -m ")[2] for call in ran]
    assert selections == [
        "not slow and not gpu and not slurm and not browser",
        "slow and not slurm and not browser and not gpu",
        "slurm and not gpu",
        "browser and not slurm and not gpu",
    ]
    # Slurm is not there and cannot be installed: said, and the tests run all the same.
    assert re.search(r"sbatch is missing.*slurm-wlm munge", result.stdout)


@pytest.mark.parametrize("failing", ["RUFF_STATUS", "PYTEST_STATUS", "COLLECT_STATUS"])
def test_ci_fails_when_a_stage_fails_but_runs_the_others(ci, failing):
    # A collection that breaks (2) is not the same as one that finds nothing (5).
    variables = {"COLLECT_STATUS": "0", "PYTEST_STATUS": "0"} | {failing: "2"}
    if failing == "COLLECT_STATUS":
        variables["PYTEST_STATUS"] = "2"
    result = ci.run(".ci/run", **variables)
    assert result.returncode == 1
    stages = summary(result)
    assert list(stages) == ["lint", "fast", "peers", "slow", "slurm", "browser"]
    assert ("exit 2" in stages["slow"]) == (failing != "RUFF_STATUS")
