"""How evenly training spread its tokens over the experts, and how much replay changed.

Shapes: L layers of the model, X experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.models.gpt import ParallelModel


def expert_metrics(model: ParallelModel) -> dict[str, float]:
    """Metrics of a mixture of experts since the last call, over all ranks; none for other models.

    The load of an expert is its share of the tokens of its layer, in multiples of an even share.
    """
    if model.arch.experts is None:
        return {}
    count = model.arch.experts.count
    counts_LC = torch.zeros((model.arch.layers, count + 2), dtype=torch.int64, device=model.device)
    for chunk in model.chunks:
        for layer in chunk.decoder.layers:
            counts_LC[layer.layer_number - 1] = layer.mlp.take_counts()
    # Ranks of a tensor group counted their own slices of the tokens, stages their own layers.
    dist.all_reduce(counts_LC, group=model.groups.world)
    counts_LC = counts_LC.double().cpu()
    tokens_LX, replayed, same = counts_LC[:, :count], *counts_LC[:, count:].sum(0).tolist()
    if not bool(tokens_LX.any()):
        return {}
    load_LX = tokens_LX / tokens_LX.mean(1, keepdim=True).clamp(min=1e-9)
    metrics = {
        "experts/load_max": float(load_LX.max()), "experts/load_min": float(load_LX.min()),
        "experts/load_max_mean": float(load_LX.amax(1).mean()),
        "experts/unused": float((tokens_LX == 0).double().mean()),
    }  # fmt: skip
    if replayed:
        metrics["experts/replay_changed"] = 1 - same / replayed
    return metrics
