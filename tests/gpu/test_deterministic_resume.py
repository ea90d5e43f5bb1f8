"""Layer: one GPU. With training.deterministic a resumed run has the bits of the undisturbed one."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.trainer import resume_run
from tests.trainer.test_resumed_run import assert_bitwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_after_a_resume_have_the_same_bits(tiny_model_dir, tmp_path, dtype, fresh_process):
    """The run is repeated from its own checkpoint of step 3, with everything later removed."""
    values = resume_run.settings(
        str(tiny_model_dir), tmp_path / "run", runtime__device="cuda", training__dtype=dtype,
        training__deterministic=True,
    )  # fmt: skip
    whole = fresh_process(resume_run.run, 0, 1, values, None)
    shutil.rmtree(tmp_path / "run" / "run" / "checkpoints" / "step_00000006")
    again = fresh_process(resume_run.run, 0, 1, values, None)
    assert (whole["start"], again["start"]) == (0, 3)
    for step, (got, want) in enumerate(zip(again["steps"], whole["steps"][3:], strict=True), 4):
        assert_bitwise(got, want, f"step {step}")
    assert_bitwise(again["tensors"], whole["tensors"], "end")
