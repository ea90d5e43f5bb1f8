"""Layer: gloo ranks. docs/metrics.md lists exactly what runs log, on every layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.trainer import run_case

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
# Dynamic sampling, experts, a learned reward model, some ways to generation have their own.
ONLY_WITH_A_SETTING = (
    r"(sampling|experts)/\w+|reward/model_mean|throughput/scoring_\w+|"
    r"\w+/(param_gather|resharding)\w*"
)
ONLY_ON_A_GPU = (
    r"memory/\w+_(allocated|reserved|fragmented)_gb|perf/gpu_memory_gb|hardware/power_watts"
)


def tensorboard_events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", [dict(parallel__pp=2), pytest.param(dict(parallel__tp=2), marks=pytest.mark.slow)]
)
def test_documented_tags_are_the_logged_tags(ranks, tiny_model_dir, tmp_path, layout):
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, checkpoint__save_interval=1, training__steps=2,
        evaluation__at_end=True, evaluation__at_start=True, checkpoint__export_huggingface=True,
        monitor={"console": False, "preflight": "off", "peak_tflops": 0.1},
        algorithm__kl={"placement": "loss", "estimator": "k2", "coef": 0.1}, **layout,
    )  # fmt: skip
    ranks(2, run_case.train, values)
    run = tmp_path / "run"
    documented = set(re.findall(r"`([a-z]+/[a-z0-9_]+)`", DOCS.read_text()))
    events = tensorboard_events(run / "tensorboard")
    tags, histograms = (set(events.Tags()[kind]) for kind in ("scalars", "histograms"))
    assert tags | histograms <= documented, (tags | histograms) - documented
    missing = documented - tags - histograms
    absent = f"{ONLY_ON_A_GPU}|{ONLY_WITH_A_SETTING}"
    missing = {tag for tag in missing if not re.fullmatch(absent, tag)}
    assert not missing, missing
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {key for row in rows for key in row} - {"step"} == tags
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {1, 2} and any(s["response"] for s in samples)
    _check_export(run / "huggingface", tiny_model_dir)


def _check_export(folder: Path, source: Path) -> None:
    """Same names and bytes as the source, loads strictly, and the weights did change."""
    import torch
    import transformers
    from safetensors.torch import load_file

    before = load_file(source / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    assert sum(v.nbytes for v in before.values()) == sum(v.nbytes for v in after.values())
    assert any(not torch.equal(before[k], after[k]) for k in before)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    transformers.AutoTokenizer.from_pretrained(folder)
