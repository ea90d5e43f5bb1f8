"""A trainable model's tensors under the names that every layout shares.

Names: `{role}.{parameter}` for weights and `{role}.optimizer.{state}.{parameter}` for the fp32 main
copy ("main_param") and the optimizer's own tensors ("exp_avg", …), with Megatron's parameter names
and global layer numbers. They hold for every optimizer class, distributed or not: state tensors
have the shape of their parameter, and a distributed optimizer holds a flat range of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.cuts import Cut, Piece, cut_of, pieces
from megatron_rl.convert.names import all_rules
from megatron_rl.engine.optimizer import Trainable
from megatron_rl.models.gpt import ParallelModel

MAIN_PARAM = "main_param"
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of the checkpoint as this rank holds it.

    Attributes:
        flat: a view of what this rank holds: elements [start, start + len) of its flattened shard.
        mine: True when this rank is the one that writes it.
    """

    name: str
    cut: Cut
    flat: Tensor
    start: int
    mine: bool

    def pieces(self) -> list[Piece]:
        return pieces(self.cut, self.flat, self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Main:
    """What the optimizer updates for one parameter: a tensor of the same shape, or a flat range."""

    tensor: Tensor
    start: int
    part: Any
    sharded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a parameter belongs in the checkpoint."""

    name: str
    parameter: torch.nn.Parameter
    cut: Cut
    first_copy: bool
    data_owner: int


def _places(model: ParallelModel) -> Iterator[_Place]:
    """Every parameter of this rank; whole ones are spread over data parallel ranks by size.

    A tied output layer on the last stage is a second copy of the embedding: it is read, not
    written.
    """
    layout, groups = model.groups.layout, model.groups
    rules = all_rules(model.arch, head=model.head, ep=layout.ep)
    written = [0] * layout.dp
    for name, parameter in model.named_parameters():
        cut = cut_of(
            rules[name], model.arch, tuple(parameter.shape), tp=layout.tp, rank=groups.tp_rank
        )
        tied = name == _OUTPUT and model.head == "lm" and model.arch.tied
        owner = written.index(min(written))
        written[owner] += parameter.numel()
        yield _Place(
            name=_EMBEDDING if tied else name, parameter=parameter, cut=cut, data_owner=owner,
            first_copy=not tied and (not cut.replicated or groups.tp_rank == 0),
        )  # fmt: skip


def _mains(trainable: Trainable) -> dict[torch.nn.Parameter, _Main]:
    """What each optimizer part updates, by model parameter."""
    found: dict[torch.nn.Parameter, _Main] = {}
    for part in trainable.optimizer.chained_optimizers:
        if hasattr(part, "shard_fp32_groups"):
            # Not by `model_param_group_index_map`: its order is another one where a group mixes
            # fp32 parameters (a value head) with 16-bit ones.
            for model_groups, main_groups in (
                (part.model_fp32_groups, part.shard_fp32_groups),
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            ):
                for parameter, main in zip(
                    chain(*model_groups), chain(*main_groups), strict=True
                ):
                    start = part._get_model_param_range_map(parameter)["param"].start
                    found[parameter] = _Main(tensor=main, start=start, part=part, sharded=True)
            continue
        mains = {id(p) for group in part.optimizer.param_groups for p in group["params"]}
        for _, parameter in trainable.model.named_parameters():
            main = getattr(parameter, "main_param", parameter)
            if id(main) in mains:
                found[parameter] = _Main(tensor=main, start=0, part=part, sharded=False)
    return found


def weight_entries(role: str, model: ParallelModel) -> list[Entry]:
    """The weights of a model, trained or not."""
    return [
        Entry(
            name=f"{role}.{place.name}", cut=place.cut, start=0,
            flat=place.parameter.detach().view(-1),
            mine=place.first_copy and place.data_owner == model.groups.dp_rank,
        )
        for place in _places(model)
    ]  # fmt: skip


def optimizer_entries(role: str, trainable: Trainable) -> list[Entry]:
    """The fp32 main parameters (where they are not the weights themselves) and optimizer state."""
    mains = _mains(trainable)
    entries = []
    for place in _places(trainable.model):
        main = mains.get(place.parameter)
        if main is None:
            continue
        mine = place.first_copy and (
            main.sharded or place.data_owner == trainable.model.groups.dp_rank
        )
        held = {
            key: value
            for key, value in main.part.optimizer.state.get(main.tensor, {}).items()
            if isinstance(value, Tensor) and value.shape == main.tensor.shape
        }
        if _storage(main.tensor) != _storage(place.parameter):
            held[MAIN_PARAM] = main.tensor
        entries += [
            Entry(
                name=f"{role}.optimizer.{key}.{place.name}", cut=place.cut, start=main.start,
                flat=value.detach().view(-1), mine=mine,
            )
            for key, value in held.items()
        ]  # fmt: skip
    return entries


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def optimizer_facts(trainable: Trainable) -> dict[str, Any]:
    """The optimizer's numbers and which tensors it keeps, as JSON; this rank's view.

    `step` is the number of updates (one for all parameters), `states` the names of its tensors,
    `scalers` the fp16 loss scalers.
    """
    states: set[str] = set()
    steps: set[float] = set()
    for main in _mains(trainable).values():
        for key, value in main.part.optimizer.state.get(main.tensor, {}).items():
            if key == "step":
                steps.add(float(value))
            elif isinstance(value, Tensor) and value.shape == main.tensor.shape:
                states.add(key)
    for part in trainable.optimizer.chained_optimizers:
        steps |= {float(g["step"]) for g in part.optimizer.param_groups if "step" in g}
    assert len(steps) <= 1, f"parameters of one optimizer took different numbers of steps: {steps}"
    return {
        "name": trainable.settings.name, "states": sorted(states),
        "step": steps.pop() if steps else None, "scalers": _scalers(trainable),
    }  # fmt: skip


def _scalers(trainable: Trainable) -> list[dict[str, float]]:
    scalers = (getattr(p, "grad_scaler", None) for p in trainable.optimizer.chained_optimizers)
    return [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in s.state_dict().items()}
        for s in scalers
        if s
    ]


def restore_optimizer(trainable: Trainable, facts: dict[str, Any]) -> None:
    """Allocates the optimizer's tensors as `facts` lists them (to be filled) and sets its numbers.

    torch's optimizers keep one step tensor per parameter and change it in place, so each gets its
    own; those of Transformer Engine and Apex keep the step in the parameter group.
    """
    for part in trainable.optimizer.chained_optimizers:
        part.optimizer.state.clear()
        step_in_state = type(part.optimizer).__module__.startswith("torch.")
        for group in part.optimizer.param_groups:
            if facts["step"] is not None and not step_in_state:
                group["step"] = int(facts["step"])
            for main in group["params"]:
                state = {key: torch.zeros_like(main) for key in facts["states"]}
                if facts["step"] is not None and step_in_state:
                    on_device = group.get("capturable") or group.get("fused")
                    state["step"] = torch.tensor(
                        facts["step"], dtype=torch.float32,
                        device=main.device if on_device else "cpu",
                    )  # fmt: skip
                if state:
                    part.optimizer.state[main] = state
    scalers = [
        p.grad_scaler
        for p in trainable.optimizer.chained_optimizers
        if getattr(p, "grad_scaler", None)
    ]
    for scaler, numbers in zip(scalers, facts["scalers"], strict=True):
        current = scaler.state_dict()
        scaler.load_state_dict(
            {k: torch.full_like(current[k], v) if isinstance(current[k], Tensor) else v
             for k, v in numbers.items()}
        )  # fmt: skip


def clear_padding(entries: list[Entry]) -> None:
    """Zeroes what is (partly) padding: the checkpoint holds only the real rows."""
    for entry in entries:
        if entry.cut.padded:
            entry.flat.zero_()


def total_bytes(entries: list[Entry]) -> int:
    """Bytes that this rank writes."""
    return sum(
        math.prod(p.data.shape) * p.data.element_size()
        for entry in entries
        if entry.mine
        for p in entry.pieces()
    )
