"""What one replica holds of a rollout, from generation to the update.

Shapes: B samples of this replica, R longest response among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.generation.sequence import Response
from megatron_rl.rollout.prompts import Prompt


@dataclass(kw_only=True, slots=True)
class RolloutBatch:
    """Samples and everything computed about them, on the CPU, equal on all ranks of a replica.

    Attributes:
        prompts, texts: prompt and decoded response of each sample.
        sequences: int64 `[length]`, prompt then response.
        prompt_lengths, response_lengths: tokens.
        group_B: int64, the prompt that each sample answers (unique over replicas).
        finished_B: bool, False where the length limit cut the response.
        mask_BR: 1 on trained response tokens, 0 on padding.
        rollout_logprobs_BR: of the distribution that was sampled.
        scores_B: reward of each sample.
        tensors: per-token results of later phases (`old_logprobs`, `ref_logprobs`, `values`,
            `advantages`, `returns`, `weights`), fp32 `[B, R]`; `bootstrap` is `[B]`.
    """

    prompts: list[Prompt]
    texts: list[str]
    sequences: list[Tensor]
    prompt_lengths: list[int]
    response_lengths: list[int]
    group_B: Tensor
    finished_B: Tensor
    mask_BR: Tensor
    rollout_logprobs_BR: Tensor
    scores_B: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all samples."""
        return sum(self.prompt_lengths) + sum(self.response_lengths)

    @property
    def length_B(self) -> Tensor:
        return torch.tensor(self.response_lengths)


def make_batch(
    prompts: list[Prompt], responses: list[Response], texts: list[str], groups: list[int]
) -> RolloutBatch:
    """Assembles a batch from generated responses (no scores yet)."""
    lengths = [len(r.token_ids) for r in responses]
    width = max(lengths)
    mask_BR = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    logprobs_BR = torch.zeros(len(responses), width)
    for row, response in enumerate(responses):
        logprobs_BR[row, : lengths[row]] = torch.tensor(response.logprobs)
    return RolloutBatch(
        prompts=prompts, texts=texts, response_lengths=lengths,
        sequences=[torch.tensor(r.prompt_ids + r.token_ids) for r in responses],
        prompt_lengths=[len(r.prompt_ids) for r in responses], group_B=torch.tensor(groups),
        finished_B=torch.tensor([r.finish_reason == "stop" for r in responses]),
        mask_BR=mask_BR.float(), rollout_logprobs_BR=logprobs_BR,
        scores_B=torch.zeros(len(responses)),
    )  # fmt: skip
