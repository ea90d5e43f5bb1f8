"""Report, command line and the call at the start of a run. Layer: this machine, one process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config import Config
from megatron_rl.preflight import PreflightError, Report, Status, check, run_preflight
from megatron_rl.preflight.__main__ import main
from megatron_rl.preflight.nodes import collect, write_report
from megatron_rl.preflight.plan import make_plan
from megatron_rl.preflight.report import Finding, fail, ok, warn
from tests.preflight.facts_factory import healthy

ROOT = Path(__file__).resolve().parents[2]
BAD = Report(
    host="n1", findings=[ok("a", "fine"), warn("b", "slow", "hurry"), fail("c", "no", "do")]
)


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\nmodel: {{actor: {{path: {tmp_path}/model}}}}\n"
        f"data: {{train: {tmp_path}/train.jsonl}}\n"
        "reward: {function: megatron_rl.rewards.functions:first_integer_exact}\n"
        "rollout: {batch_size: 4, max_new_tokens: 4}\ntraining: {steps: 1}\n"
        "runtime: {device: cpu}\nmonitor: {min_link_gbps: 0.5}\n"
    )
    return path


def test_json_round_trip():
    assert Report.from_json(BAD.to_json()) == BAD
    data = json.loads(BAD.to_json())
    assert data["exit_code"] == 1 and data["counts"] == {
        "ok": 1,
        "warn": 1,
        "fail": 1,
        "unknown": 0,
    }
    for text in ("", "[]", "{}", '{"host": "x", "findings": [{"status": "odd"}]}'):
        with pytest.raises(ValueError):
            Report.from_json(text)


def test_a_failure_without_a_fix_is_a_bug():
    with pytest.raises(AssertionError):
        Finding(status=Status.FAIL, check="x", message="broken")


def test_table_shows_every_fix_and_takes_brackets_literally():
    output = io.StringIO()
    report = Report(host="n1", findings=[*BAD.findings, ok("d", "a[b] [red]x")])
    report.print(Console(file=output, width=120))
    text = output.getvalue()
    assert "fix: do" in text and "fix: hurry" in text and "a[b] [red]x" in text
    assert text.index("slow") < text.index("no"), "failures come last"


def test_modes_of_the_start_of_a_run(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    report = run_preflight(None, "warn")
    assert [f.check for f in report.failures] == ["interfaces"]
    with pytest.raises(PreflightError, match=r"GLOO_SOCKET_IFNAME=nosuch0.* Fix: choose from"):
        run_preflight(None, "fail")
    assert run_preflight(None, "off").findings == []
    with pytest.raises(ValueError, match="monitor.preflight is 'loud'"):
        run_preflight(None, "loud")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert run_preflight(None, "fail").exit_code == 0


def test_plan_follows_config_and_launcher(config, tmp_path):
    loaded = Config.load(config, ["checkpoint.keep_last=3"])
    plan = make_plan(loaded, {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "12"})
    assert (plan.ranks_on_host, plan.hosts, plan.checkpoints_kept) == (4, 3, 3)
    assert plan.needs_gpu is False and plan.min_link_gbps == 0.5
    assert plan.checkpoint_bytes is None, "there is no model to measure yet"
    under_slurm = make_plan(None, {"SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NUM_NODES": "2"})
    assert (under_slurm.ranks_on_host, under_slurm.hosts) == (8, 2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(bytes(4000))
    (tmp_path / "model/config.json").write_text('{"dtype": "float32"}')
    # 1000 parameters; actor and critic; 14 bytes each.
    assert make_plan(loaded, {}).checkpoint_bytes == 2 * 14 * 1000


def test_command_line(config, tmp_path, capsys, monkeypatch):
    assert main(["--config", str(config), "--json", "--report-dir", str(tmp_path / "r")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"ok", "unknown"} <= {f["status"] for f in shown["findings"]}
    assert json.loads((tmp_path / f"r/{shown['host']}.json").read_text()) == shown
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert main([]) == 1
    assert "fix: choose from" in capsys.readouterr().out


def test_wrong_config_is_one_message_and_exit_2(config, capsys):
    assert main(["--config", str(config), "training.stepps=3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("preflight: ") and "training.steps" in error
    assert main(["--config", "/nowhere.yaml"]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["training.steps=3"])
    assert stopped.value.code == 2


def test_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.preflight"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "not checked" in done.stdout


def test_bad_nodes_are_named(tmp_path):
    good = Report(host="n", findings=[ok("a", "fine")])
    write_report(good, tmp_path, "n0")
    write_report(BAD, tmp_path, "n1")
    report = collect(tmp_path, ["n0", "n1", "n2"])
    assert report.exit_code == 1
    named = next(f for f in report.findings if f.check == "bad nodes")
    assert sorted(named.message.split(", ")) == ["n1", "n2"]
    assert named.fix == "submit again with: sbatch --exclude=n1,n2"
    assert any("n2 gave no report" in f.message for f in report.failures)
    assert any(f.message == "n1: no" and f.fix == "do" for f in report.failures)


def test_fault_of_every_node_is_not_blamed_on_a_node(tmp_path):
    for node in ("n0", "n1"):
        write_report(BAD, tmp_path, node)
    report = collect(tmp_path, ["n0", "n1"])
    assert not any(f.check == "bad nodes" for f in report.findings)
    assert any(f.message == "all nodes: no" for f in report.failures)
    write_report(Report(host="n0", findings=[]), tmp_path, "n0")
    assert collect(tmp_path, ["n0"]).exit_code == 0


def test_every_check_runs_on_bare_facts():
    """A machine that tells nothing gives no crash and no failure without a run."""
    facts = healthy(
        rdma_ports=None, gpus=None, needs_gpu=None, hosts=1, ranks_on_host=1, torch_cuda=None,
        driver_cuda=None, nccl=None, nccl_names=None, torch_names=None, interfaces=[], limits={},
        shared_memory_total=None, clock_synchronised=None, disk_free=None, megatron_origin=None,
    )  # fmt: skip
    report = check(facts)
    assert report.failures == []
    assert {"gpu", "rdma", "cuda", "disk", "clock", "/dev/shm"} <= {
        f.check for f in report.findings if f.status is Status.UNKNOWN
    }
