"""Keys that configurations written for other trainers of this kind use.

Each either means one of our settings and is translated, or is refused with the reason and the key
that does what was meant. One table, so that what is documented is what happens. Translation works
on nested dictionaries before they are typed; ours and theirs for one thing is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .schema import ConfigError, in_yaml, refuse

_ABSENT = object()
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """What one foreign key means here."""

    meaning: str
    """Sentence for the documentation."""
    apply: Callable[[str, Any, Values], None]
    """Writes our settings into the values; gets the dotted key and the value given."""


def translate(values: Mapping[str, Any]) -> Values:
    """A copy of ``values`` in which every foreign key has become one of our settings.

    Raises:
        ConfigError: a key without a meaning here, or given beside our setting for the same thing.
    """
    result = copy.deepcopy(dict(values))
    for name in ROLES:
        path = _get(result, f"model.{name}")
        if isinstance(path, str):
            result["model"][name] = {"path": path}
    given = [(dotted, _get(result, dotted)) for dotted in FOREIGN_KEYS]
    given = [(dotted, value) for dotted, value in given if value is not _ABSENT]
    _check_places(given)
    _check_3d(given)
    for dotted, _ in given:
        _remove(result, dotted)
    for dotted, value in given:
        FOREIGN_KEYS[dotted].apply(dotted, value, result)
    return result


ROLES = ("actor", "critic", "reference", "reward")


def _get(values: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        if not isinstance(values, Mapping) or key not in values:
            return _ABSENT
        values = values[key]
    return values


def _remove(values: Values, dotted: str) -> None:
    """Delete a key, and its section when nothing else stands there."""
    *path, last = dotted.split(".")
    section = _get(values, ".".join(path)) if path else values
    del section[last]
    if path and not section:
        _remove(values, ".".join(path))


def _set(foreign: str, ours: str, value: Any, values: Values) -> None:
    """Give our setting ``value``; refuse when it is already there."""
    if _get(values, ours) is not _ABSENT:
        raise ConfigError(
            f"{foreign} sets {ours}, which is given already; keep one of them.",
            setting=foreign,
        )
    *path, last = ours.split(".")
    section = values
    for key in path:
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            refuse(key, section, "is a section and needs `key: value` lines", "give a mapping")
    section[last] = value


def _is(ours: str) -> ForeignKey:
    """The key is another name of our setting."""

    def apply(foreign: str, value: Any, values: Values) -> None:
        _set(foreign, ours, value, values)

    return ForeignKey(f"Same as {ours}.", apply)


def _choice(meaning: str, choices: dict[Any, tuple[str, Any] | None], reason: str) -> ForeignKey:
    """Values with a meaning (setting and value, or None for what is so anyway); others refused."""

    def apply(foreign: str, value: Any, values: Values) -> None:
        key = next((key for key in choices if type(key) is type(value) and key == value), _ABSENT)
        if key is _ABSENT:
            known = " or ".join(in_yaml(choice) for choice in choices)
            refuse(foreign, value, reason, f"use {known}")
        if choices[key] is not None:
            _set(foreign, *choices[key], values)

    return ForeignKey(meaning, apply)


def _refused(reason: str, way_out: str) -> ForeignKey:
    def apply(foreign: str, value: Any, values: Values) -> None:
        refuse(foreign, value, reason, way_out)

    return ForeignKey(f"Refused: {reason}; {way_out}.", apply)


def _check_places(given: list[tuple[str, Any]]) -> None:
    names = {dotted for dotted, _ in given}
    for name in names:
        if f"hybrid_engine.{name}" in names:
            message = f"{name} and hybrid_engine.{name} are both given; keep one of them."
            raise ConfigError(message, setting=name)


def _check_3d(given: list[tuple[str, Any]]) -> None:
    """A shard strategy says how to cut in three dimensions, so it needs enable_3d."""
    by_name = {dotted.rsplit(".", 1)[-1]: (dotted, value) for dotted, value in given}
    enabled = any(
        by_name.get(name, ("", False))[1] is True for name in ("enable_3d", "enable_3d_hybrid")
    )
    for name in ("actor_shard_strategy", "critic_shard_strategy"):
        if name in by_name and not enabled:
            dotted, value = by_name[name]
            rule = "a shard strategy needs enable_3d: true beside it"
            refuse(dotted, value, rule, "add enable_3d: true, or set parallel.tp and parallel.pp")


def _actor_shards(foreign: str, value: Any, values: Values) -> None:
    """The actor is cut by tensor (pp is 1) or by layer (tp is 1)."""
    other = {"tensor": "parallel.pp", "layer": "parallel.tp"}.get(value)
    if other is None:
        refuse(foreign, value, "must be tensor or layer", "set parallel.tp and parallel.pp")
    size = _get(values, other)
    if size is not _ABSENT and size != 1:
        rule = f"cuts the actor by {value} alone, and {other} is {in_yaml(size)}"
        refuse(foreign, value, rule, f"set {other}=1 or remove {foreign}")


def _critic_shards(foreign: str, value: Any, values: Values) -> None:
    """The critic is cut by tensor or by layer over as many ranks as the actor."""
    if value not in ("tensor", "layer"):
        refuse(foreign, value, "must be tensor or layer", "set model.critic.parallel")
    sizes = [_get(values, f"parallel.{axis}") for axis in ("tp", "pp")]
    tp, pp = (1 if size is _ABSENT else size for size in sizes)
    if not all(isinstance(size, int) for size in (tp, pp)):
        return  # the typed check names the wrong one
    own = {"tp": tp * pp, "pp": 1} if value == "tensor" else {"tp": 1, "pp": tp * pp}
    if own != {"tp": tp, "pp": pp}:
        _set(foreign, "model.critic.parallel", own, values)


def _clip_grad(foreign: str, value: Any, values: Values) -> None:
    """One limit for the actor and, where there is one, the critic."""
    _set(foreign, "training.actor.clip_grad", value, values)
    if _get(values, "algorithm.name") in (_ABSENT, "ppo"):
        _set(foreign, "training.critic.clip_grad", value, values)


def _both_places(name: str, key: ForeignKey) -> dict[str, ForeignKey]:
    """A key that is found under hybrid_engine and at the top level."""
    return {name: key, f"hybrid_engine.{name}": key}


_OFFLOADS = ("actor_offload", "critic_offload", "reference_offload", "reward_offload")
_MODE = "hybrid_engine.mode"
_ALWAYS_3D = _choice(
    "true is always so: every run has tensor, pipeline and data parallelism.",
    {True: None},
    "tensor, pipeline and data parallelism can't be switched off (parallel.tp=1, parallel.pp=1)",
)
_ZERO = _choice(
    "true is hybrid_engine.mode=zero_repartitioning.",
    {True: (_MODE, "zero_repartitioning")},
    "generation off the training shards has modes of its own (hybrid_engine.mode=micro_dp, auto)",
)
_DISTRIBUTED = _choice(
    "true is training.grad_reduce=distributed_optimizer, false is ddp.",
    {
        True: ("training.grad_reduce", "distributed_optimizer"),
        False: ("training.grad_reduce", "ddp"),
    },
    "must be true or false",
)
_CLIP_GRAD = ForeignKey(
    "Same as training.actor.clip_grad, and training.critic.clip_grad when there is a critic.",
    _clip_grad,
)
_NO_LORA = _refused("LoRA is not supported yet: all weights are trained", "remove it")

FOREIGN_KEYS: dict[str, ForeignKey] = {
    "training.rollout_batch_size": _is("rollout.batch_size"),
    "training.num_rollout_workers": _refused(
        "there are no rollout workers: every rank generates on the weights that it trains",
        "remove it; replicas = ranks / (parallel.tp * parallel.pp)",
    ),
    "training.clip_grad_norm": _CLIP_GRAD,
    "clip_grad_norm": _CLIP_GRAD,
    "gradient_compression": _is("training.gradient_compression"),
    **_both_places("enable_3d", _ALWAYS_3D),
    **_both_places("enable_3d_hybrid", _ALWAYS_3D),
    **_both_places("zero_repartitioning", _ZERO),
    **_both_places(
        "actor_shard_strategy",
        ForeignKey("tensor: parallel.pp is 1; layer: parallel.tp is 1.", _actor_shards),
    ),
    **_both_places(
        "critic_shard_strategy",
        ForeignKey("tensor or layer: model.critic.parallel over tp*pp ranks.", _critic_shards),
    ),
    "micro_dp_size": _is("hybrid_engine.micro_dp_size"),
    **{name: _is(f"hybrid_engine.{name}") for name in _OFFLOADS},
    **_both_places("reward_model_offload", _is("hybrid_engine.reward_offload")),
    "checkpoint_config.save_interval": _is("checkpoint.save_interval"),
    "checkpoint_config.format": _choice(
        "torch and torch_dist are checkpoint.format=torch_dist; hdf5 is refused.",
        {
            "torch": ("checkpoint.format", "torch_dist"),
            "torch_dist": ("checkpoint.format", "torch_dist"),
        },
        "HDF5 and others need file locks, which cluster file systems don't give",
    ),
    "generation_backend": _is("rollout.backend"),
    "training_backend": _choice(
        "megatron is always so; fsdp is refused.",
        {"megatron": None},
        "Megatron-Core is the only training engine here",
    ),
    "resource_pool": _refused(
        "actor and critic share the ranks that train, without pools",
        "remove it; model.reward.ranks and model.reference.ranks give a frozen model its own",
    ),
    "lora": _NO_LORA,
    "model.lora": _NO_LORA,
    "training.lora": _NO_LORA,
    "parallel.distributed_optimizer": _DISTRIBUTED,
    "training.distributed_optimizer": _DISTRIBUTED,
}
"""Dotted foreign key -> what it means here."""


def as_markdown() -> str:
    """The table of docs/foreign_config.md: one line per meaning."""
    rows: dict[int, tuple[list[str], str]] = {}
    for dotted, key in FOREIGN_KEYS.items():
        rows.setdefault(id(key), ([], key.meaning))[0].append(f"`{dotted}`")
    lines = ["| key | meaning here |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {meaning} |" for names, meaning in rows.values()]
    return "\n".join(lines) + "\n"
