"""Layer: pure, beside a peer. Every advantage and loss that trl's trainers compute on a tiny model
is computed from the same numbers by our functions, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.algorithms.advantages import broadcast_to_tokens, group_advantages, rloo
from megatron_rl.algorithms.kl import kl_loss
from megatron_rl.algorithms.losses import policy_loss, token_weights

pytestmark = pytest.mark.slow

# loss_type → our aggregation. trl's dr_grpo divides by the samples times the longest response.
LOSSES = {
    "grpo": ("sequence_mean_token_mean", None), "bnpo": ("token_mean", None),
    "dapo": ("token_mean", None), "dr_grpo": ("constant", 6.0),
}  # fmt: skip
BETA, LOW, HIGH, GROUP = 0.3, 0.1, 0.15, 4


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.islower() for c in text) / 6 for text in completions]


def watched(base: type) -> type:
    """The trainer, with a record of what it computes."""

    class Watched(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.advantages, self.losses = [], []
            super().__init__(*args, **kwargs)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.scores = super()._calculate_rewards(*args, **kwargs)
            return self.scores

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            result = super()._generate_and_score_completions(inputs)
            self.advantages.append((self.scores[:, 0].clone(), result["advantages"].clone()))
            return result

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.last_logps = result[0]
            return result

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            loss = super()._compute_loss(model, inputs)
            self.losses.append((float(loss), inputs, self.last_logps.detach()))
            return loss

    return Watched


def train(trainer_class: type, config_class: type, folder, out, **options: Any) -> Any:
    """A few optimizer steps of a trl trainer on the CPU."""
    import datasets
    import transformers

    config = config_class(
        output_dir=str(out), use_cpu=True, report_to="none", save_strategy="no", bf16=False,
        per_device_train_batch_size=2 * GROUP, num_generations=GROUP, max_completion_length=6,
        max_steps=4, num_iterations=2, learning_rate=3e-3, seed=0, disable_tqdm=True, **options,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # A name of its own: hashing the table's contents needs what pyarrow can't pickle.
    table = datasets.table.InMemoryTable.from_pydict(
        {"prompt": ["one two", "abc", "x", "hello there"] * 4}
    )
    prompts = datasets.Dataset(table, fingerprint="prompts")
    trainer = watched(trainer_class)(
        model=model, reward_funcs=rewards, args=config, train_dataset=prompts,
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("loss_type", LOSSES)
def test_grpo_losses_and_advantages_equal_trl(tiny_model_dir, tmp_path, loss_type):
    trl = pytest.importorskip("trl")
    trainer = train(
        trl.GRPOTrainer, trl.GRPOConfig, tiny_model_dir, tmp_path, loss_type=loss_type, beta=BETA,
        epsilon=LOW, epsilon_high=HIGH, scale_rewards="none" if loss_type == "dr_grpo" else "group",
        use_bias_correction_kl=False,  # its default multiplies the KL with the policy's ratio
    )  # fmt: skip
    std = "none" if loss_type == "dr_grpo" else "sample"
    for scores, advantages in trainer.advantages:
        ours = group_advantages(scores, torch.arange(len(scores)) // GROUP, std=std, eps=1e-4)
        torch.testing.assert_close(ours, advantages.float(), atol=1e-5, rtol=1e-4)
    assert len(trainer.losses) == 4 and len(trainer.advantages) == 2
    clipped = 0.0
    for loss, inputs, logp_BR in trainer.losses:
        ours, metrics = our_loss(inputs, logp_BR, *LOSSES[loss_type])
        assert float(ours) == pytest.approx(loss, rel=1e-4, abs=1e-6)
        clipped += float(metrics["clipfrac_sum"])
    assert clipped > 0, "the second pass over a batch must reach the clip"


def our_loss(inputs: dict, logp_BR: torch.Tensor, aggregation: str, constant: float | None):
    mask_BR = inputs["completion_mask"].float()
    old_BR = inputs.get("old_per_token_logps")
    weights_BR = token_weights(
        mask_BR, aggregation, n_tokens=mask_BR.sum(), n_sequences=len(mask_BR), constant=constant
    )
    loss, metrics = policy_loss(
        logp_BR, logp_BR if old_BR is None else old_BR,
        broadcast_to_tokens(inputs["advantages"], mask_BR), weights_BR,
        clip_low=LOW, clip_high=HIGH,
    )  # fmt: skip
    kl, _ = kl_loss(logp_BR, inputs["ref_per_token_logps"], weights_BR, "k3", clamp=None)
    return loss + BETA * kl, metrics


def test_rloo_advantages_equal_trl(tiny_model_dir, tmp_path):
    trl = pytest.importorskip("trl")
    trainer = train(trl.RLOOTrainer, trl.RLOOConfig, tiny_model_dir, tmp_path, beta=0.0,
                    normalize_advantages=False)  # fmt: skip
    assert len(trainer.advantages) == 2
    for scores, advantages in trainer.advantages:
        ours = rloo(scores, torch.arange(len(scores)) // GROUP)
        assert ours.abs().max() > 0.01
        torch.testing.assert_close(ours, advantages.float(), atol=1e-6, rtol=1e-5)
