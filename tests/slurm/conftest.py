"""A Slurm of our own for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import missing_programs, start_cluster
from tests.slurm.submitted_run import Run


@pytest.fixture(scope="session")
def cluster():
    """Two nodes, started once for all tests."""
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    running = start_cluster()
    yield running
    running.stop()


@pytest.fixture
def run(cluster, tmp_path):
    """A run to be submitted; cancelled at the end of the test."""
    started = Run(cluster, tmp_path)
    yield started
    if started.job_id:
        cluster.run("scancel", started.job_id, check=False)
