"""What one replica holds of a rollout, from generation to the update.

Shapes: B samples of this replica, R longest response among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.generation.sequence import Response
from megatron_rl.rollout.prompts import Prompt


@dataclass(kw_only=True, slots=True)
class RolloutBatch:
    """Samples and everything computed about them, on the CPU, equal on all ranks of a replica.

    Attributes:
        prompts, texts: prompt and decoded response of each sample.
        sequences: int64 `[length]`, prompt then response.
        prompt_lengths, response_lengths: tokens.
        index_B: int64, number of the sample among those of the step over all replicas, prompt by
            prompt: what decides its mini-batch, so that no layout can.
        request_B: int64, number of the sample in the run (`Response.request`).
        group_B: int64, the prompt that each sample answers (unique over replicas).
        finished_B: bool, False where the length limit cut the response.
        mask_BR: 1 on trained response tokens, 0 on padding.
        rollout_logprobs_BR: of the distribution that was sampled.
        scores_B: reward of each sample.
        routes: experts that generation took (see rollout/routes.py), or None, of each sample.
        tensors: per-token results of later phases (`old_logprobs`, `ref_logprobs`, `values`,
            `advantages`, `returns`, `weights`), fp32 `[B, R]`; `bootstrap` is `[B]`.
    """

    prompts: list[Prompt]
    texts: list[str]
    sequences: list[Tensor]
    prompt_lengths: list[int]
    response_lengths: list[int]
    index_B: Tensor
    request_B: Tensor
    group_B: Tensor
    finished_B: Tensor
    mask_BR: Tensor
    rollout_logprobs_BR: Tensor
    scores_B: Tensor
    routes: list[Tensor | None]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all samples."""
        return sum(self.prompt_lengths) + sum(self.response_lengths)

    @property
    def length_B(self) -> Tensor:
        return torch.tensor(self.response_lengths, dtype=torch.int64)

    def take(self, rows: Sequence[int]) -> RolloutBatch:
        """The samples at `rows`, in that order, with everything known about them."""
        index = torch.tensor(rows, dtype=torch.int64)
        values = {
            name: [value[i] for i in rows] if isinstance(value, list) else value[index]
            for name, value in self._columns().items()
        }
        tensors = {name: value[index] for name, value in self.tensors.items()}
        return RolloutBatch(**values, tensors=tensors)

    def _columns(self) -> dict[str, list | Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tensors"}


def concatenate(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """All samples of the parts, one part after the other, padded to the longest response."""
    width = max(part.mask_BR.shape[1] for part in parts)
    columns = [part._columns() for part in parts]
    joined = {}
    for name, first in columns[0].items():
        values = [column[name] for column in columns]
        joined[name] = sum(values, []) if isinstance(first, list) else _stack(values, width)
    tensors = {
        name: _stack([part.tensors[name] for part in parts], width) for name in parts[0].tensors
    }
    return RolloutBatch(**joined, tensors=tensors)


def _stack(values: list[Tensor], width: int) -> Tensor:
    """`[B]` or `[B, R]` tensors below one another."""
    return torch.cat([v if v.dim() == 1 else pad(v, (0, width - v.shape[1])) for v in values])


def make_batch(
    prompts: list[Prompt], responses: list[Response], texts: list[str], index: list[int],
    n: int = 1, *, routes: Sequence[Tensor | None] | None = None,
) -> RolloutBatch:  # fmt: skip
    """Assembles a batch from generated responses (no scores yet; possibly none), `n` per prompt.

    Args:
        index: number of each sample in the step, prompt by prompt.
        routes: see RolloutBatch.
    """
    lengths = [len(r.token_ids) for r in responses]
    width, index_B = max(lengths, default=0), torch.tensor(index, dtype=torch.int64)
    mask_BR = torch.arange(width)[None] < torch.tensor(lengths, dtype=torch.int64)[:, None]
    logprobs_BR = torch.zeros(len(responses), width)
    for row, response in enumerate(responses):
        logprobs_BR[row, : lengths[row]] = torch.tensor(response.logprobs)
    return RolloutBatch(
        prompts=prompts, texts=texts, response_lengths=lengths,
        sequences=[torch.tensor(r.prompt_ids + r.token_ids) for r in responses],
        prompt_lengths=[len(r.prompt_ids) for r in responses],
        index_B=index_B, group_B=index_B // n,
        request_B=torch.tensor([r.request for r in responses], dtype=torch.int64),
        finished_B=torch.tensor([r.finish_reason == "stop" for r in responses], dtype=torch.bool),
        mask_BR=mask_BR.float(), rollout_logprobs_BR=logprobs_BR,
        scores_B=torch.zeros(len(responses)), routes=list(routes or [None] * len(responses)),
    )  # fmt: skip
