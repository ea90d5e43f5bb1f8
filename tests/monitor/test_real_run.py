"""Layer: gloo ranks. One small run on two replicas leaves everything that its folder promises."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from megatron_rl.monitor.__main__ import main
from megatron_rl.monitor.phases import PHASES
from megatron_rl.monitor.run_folder import read_attempts, read_rows
from tests.trainer import run_case

pytestmark = pytest.mark.ranks
STEPS, BATCH, N, EPOCHS = 3, 8, 2, 2


def run_without_plotly(rank, world, values):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plotly", "plotly.offline"):
            patch.setitem(sys.modules, name, None)
        return run_case.train(rank, world, values)


@pytest.fixture(scope="module")
def run(ranks, tiny_model_dir, tmp_path_factory) -> tuple[Path, list[dict[str, float]]]:
    """Folder of the run, and what `train` returned on each rank."""
    folder = tmp_path_factory.mktemp("real_run")
    monitor = {
        "console": False, "preflight": "off", "profile": {"steps": [2], "ranks": [0, 1]},
        "alerts": {"window": 2, "kl": 1e-9},
    }  # fmt: skip
    values = run_case.settings(
        str(tiny_model_dir), folder, training__steps=STEPS, training__epochs=EPOCHS,
        rollout={"batch_size": BATCH, "n": N, "max_new_tokens": 6}, monitor=monitor,
    )  # fmt: skip
    return folder / "run", ranks(2, run_case.train, values)


def test_metrics_are_the_same_on_all_ranks_and_one_writes(run):
    folder, (first, second) = run
    assert first == second and first["perf/eta_seconds"] == 0.0
    assert len(list((folder / "tensorboard").rglob("events*"))) == 1


def test_profile_has_the_phases_as_ranges(run):
    folder, _ = run
    files = sorted((folder / "profile").iterdir())
    assert [f.name for f in files] == [f"step_00002_rank_0000{r}.json.gz" for r in (0, 1)]
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        ranges = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
        assert {"generation", "values", "update_critic", "update_actor"} <= set(ranges)
        update = ranges["update_actor"]
        inside = {
            e["name"] for e in events if e.get("cat") == "cpu_op"
            and update["ts"] <= e["ts"] <= update["ts"] + update["dur"]
        }  # fmt: skip
        assert any("backward" in name.lower() for name in inside), inside


def test_histograms_cover_all_replicas_and_tokens(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = run
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    rows = [r for r in read_rows(folder / "metrics.jsonl") if "perf/step_seconds" in r]
    for tag, metric in (("reward", "reward/mean"), ("length", "length/response_mean")):
        for event, row in zip(events.Histograms(f"distribution/{tag}"), rows, strict=True):
            values = event.histogram_value
            assert values.num == BATCH * N
            assert values.sum / values.num == pytest.approx(row[metric], rel=1e-5)
    for event, row in zip(events.Histograms("distribution/ratio"), rows, strict=True):
        tokens = row["length/response_mean"] * BATCH * N * EPOCHS
        assert event.histogram_value.num == pytest.approx(tokens)
        mean = event.histogram_value.sum / event.histogram_value.num
        # Within the width of the buckets; ratios above 4 are in one.
        assert mean == pytest.approx(row["policy/ratio"], rel=0.1)


def test_seconds_of_the_phases_add_up_to_the_step(run):
    folder, _ = run
    rows = [r for r in read_rows(folder / "metrics.jsonl") if "perf/step_seconds" in r]
    for row in rows:
        outside = ("startup", "checkpoint", "evaluation")
        phases = sum(row.get(f"perf/{p}_seconds", 0.0) for p in PHASES if p not in outside)
        assert 0.5 * row["perf/step_seconds"] < phases <= 1.02 * row["perf/step_seconds"]
    assert "perf/startup_seconds" in rows[0] and "perf/startup_seconds" not in rows[1]


def test_alert_is_in_the_log_and_in_the_folder(run):
    folder, _ = run
    alerts = read_rows(folder / "alerts.jsonl")
    assert [(a["step"], a["rule"]) for a in alerts if a["rule"] == "kl"] == [(2, "kl")]
    log = (folder / "logs" / "rank_00000.log").read_text()
    assert "WARNING step 2: KL explosion" in log
    assert "KL explosion" not in (folder / "logs" / "rank_00001.log").read_text()


def test_folder_explains_itself(run):
    folder, _ = run
    (attempt,) = read_attempts(folder)
    assert len(attempt["ranks"]["places"]) == 2 and attempt["ranks"]["dp"] == 2
    assert attempt["versions"]["torch"] and attempt["environment"]["PATH"]
    page = (folder / "report.html").read_text()
    for name in ("reward", "kl", "entropy", "lengths", "time", "memory"):
        assert f'id="plot-{name}"' in page
    (folder / "report.html").unlink()
    assert main(["report", "--run", str(folder)]) == 0
    assert (folder / "report.html").read_text() == page


def test_a_trained_run_does_not_fail_for_want_of_plotly(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, training__steps=1, evaluation__at_start=False,
        evaluation__at_end=False,
    )  # fmt: skip
    (metrics,) = ranks(1, run_without_plotly, values)
    assert "reward/mean" in metrics
    folder = tmp_path / "run"
    log = (folder / "logs" / "rank_00000.log").read_text()
    assert log.count("plotly is not installed; pip install plotly, then python -m") == 1
    assert not (folder / "report.html").exists()
    assert main(["report", "--run", str(folder)]) == 0 and (folder / "report.html").is_file()


def test_profile_of_absent_ranks_or_steps_is_refused(tiny_model_dir, tmp_path):
    from megatron_rl import Config, ConfigError

    def config(**profile) -> Config:
        monitor = {"profile": profile, "preflight": "off"}
        return Config.from_dict(run_case.settings(str(tiny_model_dir), tmp_path, monitor=monitor))

    with pytest.raises(ConfigError, match=r"monitor\.profile\.ranks = 2: there are 2 ranks"):
        config(steps=[1], ranks=[0, 2]).validate_world(2)
    with pytest.raises(ConfigError, match=r"monitor\.profile\.steps = 4: .*training\.steps=3"):
        config(steps=[1, 4])
    with pytest.raises(ConfigError, match=r"monitor\.profile\.ranks = \[\]: no rank"):
        config(steps=[1], ranks=[])
