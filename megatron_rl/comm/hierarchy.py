"""Two levels of gradient reduction: full precision inside a node, int8 between nodes.

Shape suffixes: N data parallel ranks = M nodes · L ranks of a node, S values of a rank's shard.

Data parallel rank m·L + l is the l-th rank of node m. Each node first reduce-scatters its sum over
its own links, so that rank l holds [M, S]: the node's sum of the shards that the l-th rank of every
node owns. The slow network then carries M·S instead of N·S values per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.comm.collectives import all_gather, reduce_scatter
from megatron_rl.parallel import group_of


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """Data parallel ranks of this rank's node, and its counterparts on the other nodes."""

    inside: dist.ProcessGroup
    between: dist.ProcessGroup

    def __post_init__(self) -> None:
        assert self.inside.size() > 1 and self.between.size() > 1, "one level would do"


def build_node_groups(
    data_parallel_groups: list[list[int]], ranks_per_node: int
) -> NodeGroups | None:
    """Groups of this rank; every rank must call with the same arguments.

    Args:
        data_parallel_groups: all data parallel groups, global ranks in data parallel order.
        ranks_per_node: ranks a node runs; rank r is on node r // ranks_per_node.

    Returns:
        None where two levels do not exist: a group within one node, or one rank per node.

    Raises:
        ValueError: when the nodes hold different numbers of a group's ranks.
    """
    inside, between = [], []
    for ranks in data_parallel_groups:
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(rank // ranks_per_node, []).append(rank)
        members = list(nodes.values())
        if len({len(node) for node in members}) > 1 or sum(members, []) != ranks:
            raise ValueError(
                "training.gradient_compression.hierarchical is true, but the data parallel ranks "
                f"{ranks} lie unevenly on nodes of {ranks_per_node}; choose parallel.tp and "
                "parallel.pp so that every node holds equally many, or set hierarchical to false"
            )
        inside += members
        between += [list(column) for column in zip(*members, strict=True)]
    if len(inside[0]) == 1 or len(between[0]) == 1:
        return None
    return NodeGroups(group_of(inside), group_of(between))


def sum_inside(grad_NS: torch.Tensor, nodes: NodeGroups) -> torch.Tensor:
    """Sum over the node: fp32 [M, S], the shards owned by this rank and its counterparts."""
    node_count, per_node = nodes.between.size(), nodes.inside.size()
    grad_MLS = grad_NS.unflatten(0, (node_count, per_node))
    sent_LMS = grad_MLS.transpose(0, 1).to(torch.float32).contiguous()
    summed_MS = torch.empty_like(sent_LMS[0])
    reduce_scatter(summed_MS.view(1, -1), sent_LMS.flatten(1), nodes.inside)
    return summed_MS


def spread_inside(
    summed_MS: torch.Tensor, grad_NS: torch.Tensor, nodes: NodeGroups, gather: bool
) -> None:
    """Write the reduced shards back: the own one, or with ``gather`` those of all ranks."""
    node_count, per_node = nodes.between.size(), nodes.inside.size()
    node, local = nodes.between.rank(), nodes.inside.rank()
    if not gather:
        grad_NS[node * per_node + local].copy_(summed_MS[node])
        return
    all_LMS = summed_MS.new_empty(per_node, *summed_MS.shape)
    all_gather(all_LMS.flatten(1), summed_MS.view(1, -1), nodes.inside)
    grad_NS.unflatten(0, (node_count, per_node)).copy_(all_LMS.transpose(0, 1))
