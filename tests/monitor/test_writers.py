"""Layer: pure. Curves go on without a gap or a doubled point; the folder explains the run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.config import Config, ConfigError
from megatron_rl.monitor import run_folder, wandb_mirror
from megatron_rl.monitor.run_folder import (
    describe_run,
    git_state,
    read_attempts,
    read_rows,
    reopen_rows,
    to_line,
)
from megatron_rl.monitor.tensorboard import LAYOUT
from megatron_rl.monitor.writers import StepRecord, Writers

FAKE_WANDB = '''
runs = []
class Run:
    def __init__(self, **kwargs):
        self.kwargs, self.rows, self.code = kwargs, [], None
    def log(self, values, step): self.rows.append((step, values))
    def finish(self, exit_code): self.code = exit_code
def init(**kwargs):
    runs.append(Run(**kwargs))
    return runs[-1]
'''


def config_of(folder: Path, **monitor) -> Config:
    return Config.from_dict(
        {
            "run_dir": str(folder / "run"), "model": {"actor": {"path": "m"}},
            "data": {"train": "t"}, "training": {"steps": 9}, "seed": 77,
            "reward": {"kwargs": {"api_key": "do-not-show"}},
            "monitor": {"console": False, "alerts": {"window": 2}, **monitor},
        }
    )  # fmt: skip


def record(step: int, value: float) -> StepRecord:
    counts = torch.zeros(66, dtype=torch.float64)
    counts[30:34] = torch.tensor([1.0, 5.0, 5.0, step])
    return StepRecord(
        step=step, metrics={"reward/mean": value, "kl/ref": 0.1, "perf/step_seconds": 1.0},
        histograms={"distribution/reward": torch.full((4,), value)}, ratio_counts=counts,
        samples=[{"prompt": "a\u2028b", "response": "```\n<script>", "reward": value}],
    )  # fmt: skip


def attempt(config: Config, first: int, last: int, offset: float, *, killed: bool) -> None:
    """Steps first+1..last; a killed attempt never closes anything."""
    writers = Writers(config, total_steps=9, first_step=first)
    if first:
        # The checkpoint may have been written before the evaluation of its step.
        writers.evaluation(first, {"eval/reward_mean": float(first), "eval/prompts": 4.0})
    for step in range(first + 1, last + 1):
        writers.step(record(step, step + offset))
        if step % 2 == 0:
            writers.evaluation(step, {"eval/reward_mean": step + offset, "eval/prompts": 4.0})
    if not killed:
        writers.close(failed=False)


def events_of(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


@pytest.mark.parametrize("resumed_at", [0, 4])
def test_resumed_curves_have_every_step_once(tmp_path, resumed_at):
    config = config_of(tmp_path)
    attempt(config, 0, 6, 0.0, killed=True)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rewa')  # cut off in the middle of a row
    attempt(config, resumed_at, 9, 0.5, killed=False)
    events = events_of(tmp_path / "run" / "tensorboard")
    expected = [(s, s + (0.5 if s > resumed_at else 0.0)) for s in range(1, 10)]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == expected
    evaluated = [pair for pair in expected if pair[0] % 2 == 0]
    assert [(e.step, e.value) for e in events.Scalars("eval/reward_mean")] == evaluated
    for tag in ("distribution/reward", "distribution/ratio"):
        assert [e.step for e in events.Histograms(tag)] == list(range(1, 10))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [(r["step"], r["reward/mean"]) for r in rows if "reward/mean" in r] == expected
    assert [r["step"] for r in rows if "eval/prompts" in r] == [2, 4, 6, 8]
    samples = read_rows(tmp_path / "run" / "samples.jsonl")
    assert [row["step"] for row in samples] == list(range(1, 10))
    assert samples[0]["prompt"] == "a\u2028b"


def test_tensorboard_has_layout_histogram_text_and_settings(tmp_path):
    attempt(config_of(tmp_path), 0, 2, 0.0, killed=False)
    events = events_of(tmp_path / "run" / "tensorboard")
    ratio = events.Histograms("distribution/ratio")[-1].histogram_value
    assert ratio.num == 13.0 and sum(ratio.bucket) == 13.0 and ratio.min < 1 < ratio.max
    assert len(ratio.bucket) == len(ratio.bucket_limit) == 4
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "**reward 1.000**" in text and "    <script>" in text
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    layout = Layout.FromString(
        events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    )
    assert [c.title for c in layout.category] == list(LAYOUT)
    assert list(layout.category[0].chart[0].multiline.tag)[0] == "reward/mean"
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["seed"].number_value == 77 and settings["training.actor.lr"].number_value
    assert "do-not-show" not in str(settings)


def test_layout_names_tags_that_exist():
    docs = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for charts in LAYOUT.values():
        for tags in charts.values():
            assert all(f"`{tag}`" in docs for tag in tags), tags


def test_alerts_of_a_resumed_run_know_what_was_before(tmp_path, caplog):
    config = config_of(tmp_path)
    writers = Writers(config, total_steps=9, first_step=0)
    for step, kl in enumerate([0.1, 0.1, 9.0, 9.0], 1):
        metrics = {"kl/ref": kl, "perf/step_seconds": 1.0}
        writers.step(StepRecord(step=step, metrics=metrics))
    rows = read_rows(tmp_path / "run" / "alerts.jsonl")
    assert [(row["step"], row["rule"]) for row in rows] == [(3, "kl")]
    writers = Writers(config, total_steps=9, first_step=4)
    writers.step(StepRecord(step=5, metrics={"kl/ref": 9.0, "perf/step_seconds": 1.0}))
    assert "kl" in writers.alerts.active
    assert len(read_rows(tmp_path / "run" / "alerts.jsonl")) == 1, "not reported twice"
    writers.close(failed=True)


def test_wandb_mirrors_the_tags_and_resumes_its_run(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    attempt(config_of(tmp_path), 0, 1, 0.0, killed=False)
    assert "wandb" not in sys.modules, "off by default, and then not even imported"
    wandb_mirror.check_installed()
    config = config_of(tmp_path, wandb=True)
    attempt(config, 0, 2, 0.0, killed=False)
    attempt(config, 2, 3, 0.0, killed=False)
    first, second = sys.modules.pop("wandb").runs
    assert first.kwargs["id"] == second.kwargs["id"] and second.kwargs["resume"] == "allow"
    assert first.kwargs["config"]["seed"] == 77 and "do-not-show" not in str(first.kwargs)
    logged = [(step, tag) for step, values in first.rows for tag in values]
    events = events_of(tmp_path / "run" / "tensorboard")
    tags = [(e.step, tag) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    assert sorted(logged + [(s, t) for s, v in second.rows for t in v]) == sorted(tags)
    assert first.code == 0


def test_missing_wandb_is_one_sentence(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"monitor\.wandb = true.*pip install wandb"):
        wandb_mirror.check_installed()


def test_run_json_has_every_attempt_and_no_secret(tmp_path, monkeypatch):
    secret = f"s{random.randrange(10**12)}"
    monkeypatch.setenv("MY_API_KEY", secret)
    monkeypatch.setenv("PLAIN_SETTING", "visible")
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", f"reward.kwargs.token={secret}"])
    config, places = config_of(tmp_path), {"places": [{"host": "a", "device": "b"}], "tp": 1}
    folder = tmp_path / "run"
    for first_step in (0, 5, 7):
        describe_run(config, folder, first_step=first_step, ranks=places)
    attempts = read_attempts(folder)
    assert [a["first_step"] for a in attempts] == [0, 5, 7]
    assert attempts[1]["environment"]["PLAIN_SETTING"] == "visible"
    assert attempts[1]["command"][1:] == ["train_ppo.py", "reward.kwargs.token=[redacted]"]
    assert {"torch", "megatron-core", "python", "megatron-rl"} <= set(attempts[0]["versions"])
    assert attempts[0]["ranks"] == places
    assert secret not in (folder / "run.json").read_text()
    assert Config.load(folder / "config.yaml") == config
    describe_run(config, folder, first_step=0, ranks=places)
    assert len(read_attempts(folder)) == 1, "a run from the beginning starts a new history"


def test_git_state_names_commit_and_changes(tmp_path):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, text=True,
            capture_output=True,
        ).stdout  # fmt: skip

    assert git_state(tmp_path) == ({}, "")
    git("init", "-q", "-b", "trunk")
    (tmp_path / "file.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    state, diff = git_state(tmp_path)
    assert state == {"commit": git("rev-parse", "HEAD").strip(), "branch": "trunk", "changed": []}
    assert diff == ""
    (tmp_path / "file.py").write_text("x = 2\n")
    (tmp_path / "new.py").write_text("")
    state, diff = git_state(tmp_path)
    assert state["changed"] == ["file.py", "new.py"] and "+x = 2" in diff


def test_uncommitted_changes_are_kept_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(
        run_folder, "git_state",
        lambda source: ({"commit": "c", "branch": "b", "changed": ["f"]}, "+key = hf_" + "a" * 30),
    )  # fmt: skip
    describe_run(config_of(tmp_path), tmp_path / "run", first_step=0, ranks={})
    assert (tmp_path / "run" / "source.diff").read_text() == "+key = [redacted]"


def test_rows_survive_every_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = ["plain", "two\nlines", "\u2028", "\x85 \u2029", '"quoted" \\ ⏵ 日本', "\x00\x1f"]
    path.write_text("".join(to_line({"step": i, "text": t}) for i, t in enumerate(texts)))
    assert len(path.read_text().splitlines()) == len(texts)
    assert [row["text"] for row in read_rows(path)] == texts
    reopen_rows(path, 2).close()
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2]
    path.write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_rows(path)
    assert json.loads(to_line({"a": 1})) == {"a": 1}
