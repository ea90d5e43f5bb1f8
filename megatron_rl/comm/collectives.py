"""Gather and reduce-scatter of flat tensors under the names of every supported torch.

torch 2.13 renamed them (``all_gather_single``, ``reduce_scatter_single``) and warns about the old
names, which older versions only know.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather(
    out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Every rank's ``mine`` along the first dim of ``out``."""
    known = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, known)(out, mine, group=group, async_op=async_op)


def reduce_scatter(out: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The sum over ranks of the row of ``parts`` that belongs to this rank."""
    known = "reduce_scatter_single"
    known = known if hasattr(dist, known) else "reduce_scatter_tensor"
    getattr(dist, known)(out, parts, group=group)
