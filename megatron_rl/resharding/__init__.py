"""From the training layout to the generation layout with the fewest bytes: plan, then move.

Planning is pure data and needs no torch: `grid` (which rank stands where), `specs` (how a tensor
is cut), `plan` (which block goes where), `volumes` (how many bytes that is). Moving is `execute`
(whole generation tensors) or `segments` (training shards used as they are). See docs/resharding.md.
"""

from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.plan import Plan, make_plan
from megatron_rl.resharding.specs import Cut, TensorSpec

__all__ = ["Cut", "Plan", "ShardGrid", "TensorSpec", "generation_grid", "make_plan"]
