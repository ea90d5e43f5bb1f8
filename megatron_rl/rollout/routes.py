"""Which experts generation took, from the ranks that know to the samples that carry it.

Routes of a sample: int16 `[L, tokens - 1, K]` over all layers of the model. The last token of a
sample went through no layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.generation.sequence import Response
from megatron_rl.models.gpt import ParallelModel


def join_stages(responses: Sequence[Response], model: ParallelModel) -> list[Tensor | None]:
    """The routes of responses over all layers; collective over the pipeline.

    Args:
        responses: of this replica, the same on all its ranks.
        model: which generated them.

    Returns:
        One per response; None each where the engine did not keep them.
    """
    if any(response.routes is None for response in responses):
        return [None] * len(responses)
    numbers = [layer.layer_number - 1 for chunk in model.chunks for layer in chunk.decoder.layers]
    mine = (numbers, [response.routes.wait() for response in responses])
    groups, parts = model.groups, [mine]
    if groups.layout.pp > 1:
        parts = [mine] * groups.layout.pp
        dist.all_gather_object(parts, mine, group=groups.pipeline_control())
    order = torch.tensor([number for numbers, _ in parts for number in numbers]).argsort()
    stages = zip(*(routes for _, routes in parts), strict=True)
    return [torch.cat(of_stages)[order] for of_stages in stages]
