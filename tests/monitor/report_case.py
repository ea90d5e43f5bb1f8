"""A run folder with the rows of an invented run, for tests of the report."""

from __future__ import annotations

import json
import random
from pathlib import Path

NASTY = "</script><script>throw new Error('escaped')</script><b>bold</b> %%CONFIG%%"
SECRET = "do-not-show"


def write_run(folder: Path, steps: int = 80) -> Path:
    """Metrics that rise and fall, an evaluation, an alert, samples that try to break the page."""
    rng = random.Random(steps)
    rows = []
    for step in range(1, steps + 1):
        row = {
            "reward/mean": step / steps + rng.gauss(0, 0.05), "reward/std": 0.2,
            "kl/ref": step / 500, "policy/entropy": 2.0 - step / steps,
            "length/response_mean": 50.0 + step, "length/response_max": 120.0,
            "policy/clipfrac": 0.1, "perf/step_seconds": 2.0, "perf/generation_seconds": 1.2,
            "perf/update_actor_seconds": 0.7, "perf/tokens_per_second": 900.0,
            "memory/generation_allocated_gb": 3.0, "memory/update_actor_allocated_gb": 9.0,
            "policy/grad_norm": float("nan") if step == 3 else 1.0,
        }  # fmt: skip
        rows.append({"step": step, **row})
        if step in (1, steps):
            rows.append({"step": step, "eval/reward_mean": step / steps, "eval/prompts": 8.0})
    folder.mkdir(parents=True, exist_ok=True)
    samples = [
        {"step": step, "prompt": NASTY, "response": f"{NASTY} {step}", "reward": 0.5}
        for step in (1, 2, steps)
    ]
    alerts = [{"step": 40, "rule": "kl", "message": f"KL explosion {NASTY}"},
              {"step": 50, "rule": "kl", "message": None}]  # fmt: skip
    for name, lines in (("metrics", rows), ("samples", samples), ("alerts", alerts)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    config = {"run_dir": str(folder), "note": NASTY, "reward": {"kwargs": {"api_key": SECRET}}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return folder
