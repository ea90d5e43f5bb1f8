"""The real trainer under a real Slurm: stopped, requeued, resumed at the exact step.

Layer: real slurmctld and slurmd, two gloo ranks, a tiny model. The other cases, which do not depend
on what is trained, are in test_jobs.py.
"""

from __future__ import annotations

import json

import pytest

# Few steps, of which some are left when the signal comes, also on a fast machine.
SLOWLY = """
import time

def score(prompts, responses, records):
    time.sleep(0.7)
    return [float(len(r)) for r in responses]
"""
pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_trainer_is_requeued_and_resumes_at_the_exact_step(run, tiny_model_dir, launcher):
    run.model = tiny_model_dir
    prompts = [json.dumps({"prompt": f"{a} + 1 =", "answer": str(a + 1)}) for a in range(16)]
    (run.folder / "train.jsonl").write_text("\n".join(prompts) + "\n")
    (run.folder / "slowly.py").write_text(SLOWLY)
    steps = 10
    run.submit(
        "--train-script=train_ppo.py", f"--launcher={launcher}", "parallel.tp=2",
        f"reward.function={run.folder}/slowly.py:score", steps=steps,
    )  # fmt: skip
    run.wait_for_step(2)
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job_id)
    job = run.wait()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), run.log
    assert run.steps == list(range(1, steps + 1)), run.log
