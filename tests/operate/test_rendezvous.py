"""Slurm's variables as torchrun's. Layer: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ConfigError
from megatron_rl.rendezvous import (
    adopt_slurm_variables,
    first_node,
    port_of,
    tasks_per_node,
)

STEP = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_NODEID": "2", "SLURM_JOB_ID": "41234",
    "SLURM_STEP_NODELIST": "localhost,nosuch[1-2]",
}  # fmt: skip


def adopted(**changes: str | None) -> dict[str, str]:
    environ = {name: value for name, value in (STEP | changes).items() if value is not None}
    before = dict(environ)
    adopt_slurm_variables(environ)
    return {name: value for name, value in environ.items() if name not in before}


def test_a_job_step_gets_torchruns_variables():
    assert adopted() == {
        "RANK": "9", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(10000 + 41234 % 20000),
    }  # fmt: skip


def test_what_is_set_stays():
    assert adopted(RANK="0") == {}
    own = adopted(MASTER_ADDR="10.0.0.1", MASTER_PORT="999")
    assert "MASTER_ADDR" not in own and "MASTER_PORT" not in own


def test_uneven_nodes():
    own = adopted(SLURM_STEP_TASKS_PER_NODE="4(x2),3,1", SLURM_NODEID="3")
    assert own["LOCAL_WORLD_SIZE"] == "1"


def test_one_node_meets_on_the_loopback():
    own = adopted(SLURM_STEP_TASKS_PER_NODE="12", SLURM_NODEID="0", SLURM_STEP_NODELIST="nosuch7")
    assert own["MASTER_ADDR"] == "127.0.0.1"


def test_a_batch_script_and_a_single_task_are_one_rank():
    assert adopted(SLURM_STEP_ID=None) == {}
    assert adopted(SLURM_STEP_NUM_TASKS="1") == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4x3"}, "is '4x3'"),
        ({"SLURM_STEP_NODELIST": "$(id)"}, "MASTER_ADDR"),
    ],
)
def test_variables_that_make_no_sense_are_one_message(changes, said):
    with pytest.raises(ConfigError) as error:
        adopted(**changes)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"), ("gpu7,gpu9", "gpu7"), ("node[03-07,9]", "node03"),
        ("node[9,11-12],x", "node9"), ("rack[1-2]-n[04-08]", "rack1-n04"),
        ("a-b.c_d,e[1-2]", "a-b.c_d"),
    ],
)  # fmt: skip
def test_first_node(nodes, first):
    assert first_node(nodes) == first


@given(st.lists(st.integers(1, 16), min_size=1, max_size=12))
def test_tasks_per_node(counts):
    runs: list[tuple[int, int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1] = (count, runs[-1][1] + 1)
        else:
            runs.append((count, 1))
    text = ",".join(f"{count}(x{n})" if n > 1 else str(count) for count, n in runs)
    assert tasks_per_node(text) == counts


@given(st.integers(0, 2**31))
def test_ports_are_neither_privileged_nor_ephemeral_and_neighbours_differ(job):
    assert 1024 < port_of(job) < 32768
    assert port_of(job) != port_of(job + 1)


@pytest.mark.parametrize(
    ("local_rank", "local_ranks", "count", "by_slurm", "index"),
    [
        (3, 8, 8, False, 3), (3, 8, 8, True, 3),  # all GPUs of the node are seen
        (3, 8, 1, True, 0),  # --gpus-per-task=1
        (1, 2, 1, False, None),  # two ranks on a machine with one GPU
        (0, 1, 0, True, None), (3, 8, 4, True, None), (0, 8, 4, False, None),
    ],
)  # fmt: skip
def test_gpu_of_a_rank(local_rank, local_ranks, count, by_slurm, index):
    from megatron_rl.runtime import gpu_of

    assert gpu_of(local_rank, local_ranks, count, by_slurm=by_slurm) == index
