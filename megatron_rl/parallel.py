"""Who works with whom: rank arithmetic and process groups.

`Layout` is arithmetic only (no communication): it places every rank on the tensor (tp), data (dp)
and pipeline (pp) axes, tensor fastest and pipeline slowest, as Megatron-Core does.
`ParallelGroups` holds the process groups of one layout and hands them to Megatron-Core as a
`ProcessGroupCollection`. Several layouts live side by side in one process: nothing here is global
except the cache of groups with equal ranks, and this is the only module that touches Megatron's
`parallel_state`, which is initialised once, neutrally (TP1 PP1), because Megatron keeps its memory
buffers there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the parallel axes over `world_size` ranks.

    Rank r sits at tp = r mod tp, dp = (r // tp) mod dp, pp = r // (tp·dp).

    `ep` parts of each tensor group hold whole experts (of a mixture of experts): ranks of a part
    follow one another and share its experts' feed-forward size.

    With strides above one the layout is laid over a wider one of tp·tp_stride × pp·pp_stride: its
    tensor groups take every `tp_stride`-th rank and its pipelines every `pp_stride`-th stage, so
    that tp_stride·pp_stride replicas stand inside each replica of the wider layout, numbered one
    after the other (`generation_layout`).

    Raises:
        ValueError: if the product does not match the world size.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    tp_stride: int = 1
    pp_stride: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "vpp", "ep", "tp_stride", "pp_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} is {getattr(self, name)}: it must be at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"parallel.vpp is {self.vpp} with parallel.pp 1: virtual stages need pp of 2 or "
                "more; set parallel.vpp=1 or raise parallel.pp"
            )
        if self.tp % self.ep:
            raise ValueError(
                f"parallel.ep is {self.ep} with parallel.tp {self.tp}: experts are spread over the "
                f"ranks of a tensor parallel group, so ep must divide tp; use one of "
                f"{_divisors(self.tp)}, or raise parallel.tp"
            )
        if self.world_size % (self.tp * self.pp * self.inner_replicas):
            fits = sorted(
                (t, p)
                for t in _divisors(self.world_size)
                for p in _divisors(self.world_size // t)
            )
            shown = ", ".join(f"tp={t} pp={p}" for t, p in fits[:12])
            raise ValueError(
                f"parallel.tp × parallel.pp is {self.tp} × {self.pp} = {self.tp * self.pp}, which "
                f"does not divide the {self.world_size} ranks that were started; what fits: {shown}"
            )

    @property
    def dp(self) -> int:
        """Data parallel size: the number of model replicas."""
        return self.world_size // (self.tp * self.pp)

    @property
    def inner_replicas(self) -> int:
        """Replicas of this layout inside one replica of the layout that it is laid over."""
        return self.tp_stride * self.pp_stride

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, dp, pp) position of `rank`."""
        outer, across = divmod(rank, self.tp * self.tp_stride)
        down, outer_dp = divmod(outer, self.dp // self.inner_replicas)
        tp, inner_tp = divmod(across, self.tp_stride)
        pp, inner_pp = divmod(down, self.pp_stride)
        return tp, (outer_dp * self.pp_stride + inner_pp) * self.tp_stride + inner_tp, pp

    def rank_at(self, *, tp: int, dp: int, pp: int) -> int:
        """The rank at a position; the inverse of `coordinates`."""
        rest, inner_tp = divmod(dp, self.tp_stride)
        outer_dp, inner_pp = divmod(rest, self.pp_stride)
        down = pp * self.pp_stride + inner_pp
        outer = outer_dp + self.dp // self.inner_replicas * down
        return tp * self.tp_stride + inner_tp + self.tp * self.tp_stride * outer

    def generation_layout(self, *, tp: int, pp: int) -> Layout:
        """The layout of `tp` × `pp` generation replicas inside this layout's replicas.

        Ranks are taken at strides (zero-redundancy grouping, Sheng et al. 2024, section 5.3), so
        that what a rank trains is part of what it generates with. Virtual stages stay where a
        pipeline stays.

        Raises:
            ValueError: if a size does not divide this layout's.
        """
        for axis, small, large in (("tp", tp, self.tp), ("pp", pp, self.pp)):
            if large % small:
                raise ValueError(
                    f"generation {axis}={small} must divide the training {axis}={large}; use one "
                    f"of {_divisors(large)}"
                )
        return Layout(
            world_size=self.world_size, tp=tp, pp=pp, vpp=self.vpp if pp > 1 else 1,
            tp_stride=self.tp // tp, pp_stride=self.pp // pp,
        )  # fmt: skip

    def group_ranks(self, axes: Iterable[str]) -> list[list[int]]:
        """All groups whose members differ only along `axes` (subset of tp, dp, pp).

        Returns:
            Every group once, members in ascending rank order.
        """
        axes = set(axes)
        unknown = axes - {"tp", "dp", "pp"}
        assert not unknown, f"unknown axes {unknown}"
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = dict(zip(("tp", "dp", "pp"), self.coordinates(rank), strict=True))
            key = tuple(place[a] for a in ("tp", "dp", "pp") if a not in axes)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def embedding_ranks(self) -> list[list[int]]:
        """First and last pipeline stage of every pipeline: they share tied embeddings."""
        return [sorted({ranks[0], ranks[-1]}) for ranks in self.group_ranks({"pp"})]


    def expert_ranks(self) -> list[list[int]]:
        """Groups over which the experts of a tensor group are spread: one rank of each part."""
        slices = self.tp // self.ep
        return [g[i::slices] for g in self.group_ranks({"tp"}) for i in range(slices)]

    def expert_slice_ranks(self) -> list[list[int]]:
        """Groups that share the feed-forward size of the same experts."""
        slices = self.tp // self.ep
        return [
            g[i : i + slices] for g in self.group_ranks({"tp"}) for i in range(0, self.tp, slices)
        ]

    def inner_groups(self) -> list[list[int]]:
        """Ranks that hold the same part of the model inside one replica of the wider layout, in
        the order of their replicas."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        for rank in sorted(range(self.world_size), key=lambda rank: self.coordinates(rank)[1]):
            tp, dp, pp = self.coordinates(rank)
            groups.setdefault((tp, dp // self.inner_replicas, pp), []).append(rank)
        return list(groups.values())


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


_groups_by_ranks: dict[tuple, dist.ProcessGroup] = {}
_timeout = timedelta(minutes=30)


def set_group_timeout(seconds: float) -> None:
    """Sets the timeout of the group of all ranks and of every group created from now on.

    The group of all ranks was created with the time to wait for all ranks at the start.
    """
    global _timeout
    _timeout = timedelta(seconds=seconds)
    dist.distributed_c10d._set_pg_timeout(_timeout)


def forget_groups() -> None:
    """Empties the cache after the default process group was destroyed."""
    _groups_by_ranks.clear()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()


def group_timeout() -> timedelta:
    """The timeout of groups created now."""
    return _timeout


def group_of(
    all_groups: list[list[int]], *, backend: str | None = None, purpose: str = ""
) -> dist.ProcessGroup | None:
    """Creates (or finds) every listed group; all ranks must call with the same list.

    Args:
        backend: defaults to that of the run.
        purpose: groups of the same ranks for another purpose are other groups.

    Returns:
        The group that this rank is in, or None.
    """
    mine = None
    for ranks in all_groups:
        key = (backend, purpose, *ranks)
        if key not in _groups_by_ranks:
            _groups_by_ranks[key] = dist.new_group(list(ranks), backend=backend, timeout=_timeout)
        if dist.get_rank() in ranks:
            mine = _groups_by_ranks[key]
    return mine


def control_group(all_groups: list[list[int]]) -> dist.ProcessGroup:
    """A gloo group for small data of the CPU, which does not wait for the device."""
    return group_of(all_groups, backend="gloo")


@dataclass(kw_only=True, slots=True)
class ParallelGroups:
    """The process groups of one layout, as seen from this rank."""

    layout: Layout
    tp: dist.ProcessGroup = field(init=False)
    dp: dist.ProcessGroup = field(init=False)
    pp: dist.ProcessGroup = field(init=False)
    model: dist.ProcessGroup = field(init=False)
    embedding: dist.ProcessGroup = field(init=False)
    expert: dist.ProcessGroup = field(init=False)
    expert_slice: dist.ProcessGroup = field(init=False)
    replica_of_stage: dist.ProcessGroup = field(init=False)
    single: dist.ProcessGroup = field(init=False)
    world: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        assert layout.world_size == dist.get_world_size(), (
            f"a layout of {layout.world_size} ranks in a world of {dist.get_world_size()}"
        )
        initialise_parallel_state()
        self.tp = group_of(layout.group_ranks({"tp"}))
        self.dp = group_of(layout.group_ranks({"dp"}))
        self.pp = group_of(layout.group_ranks({"pp"}))
        self.model = group_of(layout.group_ranks({"tp", "pp"}))
        self.embedding = group_of(layout.embedding_ranks()) or self.single_rank_group()
        self.single = self.single_rank_group()
        self.expert = group_of(layout.expert_ranks())
        self.expert_slice = group_of(layout.expert_slice_ranks())
        self.replica_of_stage = group_of(layout.group_ranks({"tp", "dp"}))
        self.world = group_of([list(range(layout.world_size))])
        for create in (self.control, self.pipeline_control, self.data_control):
            create()
        for name, size in (("tp", layout.tp), ("dp", layout.dp), ("pp", layout.pp)):
            found = getattr(self, name).size()
            assert found == size, f"the {name} group has {found} ranks, expected {size}"

    def control(self) -> dist.ProcessGroup:
        """The ranks of this replica, for small host data (see `control_group`)."""
        return control_group(self.layout.group_ranks({"tp", "pp"}))

    def pipeline_control(self) -> dist.ProcessGroup:
        """The pipeline, for small host data."""
        return control_group(self.layout.group_ranks({"pp"}))

    def data_control(self) -> dist.ProcessGroup:
        """The data parallel ranks, for small host data."""
        return control_group(self.layout.group_ranks({"dp"}))

    def inner_control(self) -> dist.ProcessGroup:
        """The ranks of `Layout.inner_groups`, for small host data."""
        return control_group(self.layout.inner_groups())

    def single_rank_group(self) -> dist.ProcessGroup:
        """The group of this rank alone (stands in for axes of size one)."""
        return group_of([[r] for r in range(self.layout.world_size)])

    @property
    def tp_rank(self) -> int:
        return self.tp.rank()

    @property
    def dp_rank(self) -> int:
        return self.dp.rank()

    @property
    def pp_rank(self) -> int:
        return self.pp.rank()

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    def stage_rank(self, stage: int) -> int:
        """Global rank of pipeline stage `stage` on this rank's pipeline."""
        return dist.get_global_rank(self.pp, stage)

    def collection(self):
        """These groups as Megatron-Core's `ProcessGroupCollection` (CP is of size one).

        Experts are data parallel over the same ranks as all else, since a tensor group holds each
        of them once.
        """
        from megatron.core.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection(
            tp=self.tp, pp=self.pp, mp=self.model, embd=self.embedding, pos_embd=self.single,
            cp=self.single, tp_cp=self.tp, ep=self.expert, expt_tp=self.expert_slice,
            tp_ep=self.tp, tp_dp_cp=self.replica_of_stage,
            tp_ep_pp=self.model, dp=self.dp, dp_cp=self.dp, expt_dp=self.dp, intra_dp_cp=self.dp,
            intra_expt_dp=self.dp, intra_dist_opt=self.world, hcp=[],
        )  # fmt: skip


def initialise_parallel_state() -> None:
    """Initialises Megatron's global state once, with every model axis of size one."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            1, 1, create_gloo_process_groups=False,
            distributed_timeout_minutes=_timeout.total_seconds() / 60,
        )  # fmt: skip


def seed_model_parallel(seed: int, groups: ParallelGroups) -> None:
    """Seeds Megatron's RNG tracker: TP ranks draw different, DP ranks equal numbers."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(
        seed + 100 * groups.pp_rank,
        tp_rank=groups.tp_rank, ep_rank=groups.expert.rank(), etp_rank=groups.expert_slice.rank(),
    )  # fmt: skip
