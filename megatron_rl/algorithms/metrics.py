"""Adding up the metrics of losses over micro-batches and ranks, then turning sums into means.

A key says how it is combined: `*_max` by maximum, everything else by addition. After the last
addition `mean_metrics` divides each `*_sum` by `tokens`. Values are scalars, except `*_hist`: the
counts of a histogram's buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def is_histogram(key: str) -> bool:
    """Whether this metric is the counts of a histogram's buckets."""
    return key.endswith("_hist")


def add_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine the metrics of micro-batches. Every part must have the same keys."""
    total: dict[str, Tensor] = {}
    for index, part in enumerate(parts):
        if index and part.keys() != total.keys():
            raise ValueError(
                f"micro-batches report different metrics: {sorted(part)} and {sorted(total)}"
            )
        for key, value in part.items():
            value = value.detach().double()
            if key not in total:
                total[key] = value
            elif key.endswith("_max"):
                total[key] = torch.maximum(total[key], value)
            else:
                total[key] = total[key] + value
    return total


def reduce_metrics(
    metrics: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Combine over the ranks of `group`, which must all hold the same keys: two all-reduces."""
    reduced: dict[str, Tensor] = {}
    for op, is_max in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
        keys = sorted(key for key in metrics if key.endswith("_max") == is_max)
        if not keys:
            continue
        shapes = [metrics[key].shape for key in keys]
        values = torch.cat([metrics[key].detach().double().reshape(-1) for key in keys])
        if group is not None and group.size() > 1:
            dist.all_reduce(values, op=op, group=group)
        parts = values.split([shape.numel() for shape in shapes])
        reduced.update(
            (key, part.reshape(shape))
            for key, part, shape in zip(keys, parts, shapes, strict=True)
        )
    return reduced


def mean_metrics(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Numbers to log: `x_sum` becomes `x`, its mean over the tokens; the rest stays.

    With the value loss's sums present, `explained_variance` = 1 - Var(R - v) / Var(R) is added; it
    is 0 where the returns don't vary. Without trained tokens every mean is 0.
    """
    numbers = {key: float(value) for key, value in metrics.items() if not is_histogram(key)}
    tokens = max(numbers.get("tokens", 0.0), 1.0)
    means = {
        key.removesuffix("_sum"): value / tokens if key.endswith("_sum") else value
        for key, value in numbers.items()
    }
    if "value_error_sq" in means:
        error_variance = means["value_error_sq"] - means["value_error"] ** 2
        return_variance = means["return_sq"] - means["return"] ** 2
        varies = return_variance > 1e-12 * means["return_sq"]
        means["explained_variance"] = 1.0 - error_variance / return_variance if varies else 0.0
    return means
