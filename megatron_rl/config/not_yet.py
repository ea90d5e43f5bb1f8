"""Settings whose feature does not exist yet: one table, one message.

The keys are typed and range-checked like all others, so a file that uses them is known to be right
on the day the feature lands; until then a value that asks for the feature is refused. Adding the
feature means removing its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .schema import in_yaml, refuse

Predicate = Callable[[Any], bool]


def _more_than_one(value: Any) -> bool:
    return value > 1


def _is_true(value: Any) -> bool:
    return value is True


def _is(*refused: str) -> Predicate:
    return lambda value: value in refused


NOT_YET: dict[str, tuple[Predicate, str]] = {
    "parallel.cp": (_more_than_one, "context parallelism"),
    "rollout.backend": (_is("vllm"), "generation by vLLM"),
    "comm_trace.enable": (_is_true, "the communication trace"),
}
"""Dotted key -> (does this value ask for the feature?, what the feature is)."""


def check_not_yet(config: Any, default: Callable[[str], Any]) -> None:
    """Refuse the first setting of ``config`` whose feature does not exist yet.

    Args:
        default: gives the default value of a dotted key, which is the way out.
    """
    for dotted, (asks_for_it, feature) in NOT_YET.items():
        value = config.value(dotted)
        if asks_for_it(value):
            way_out = f"leave {dotted} at its default, {in_yaml(default(dotted))}"
            refuse(dotted, value, f"not supported yet: {feature}", way_out)
