"""Ranks tell each other what went wrong, so that an error on one is the same error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_rl.checkpoint.folder import CheckpointError

T = TypeVar("T")


def on_all_ranks(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Runs `action` on every rank of `group`.

    Raises:
        CheckpointError: on all ranks alike if any rank's action raised `OSError` or `ValueError`;
            any other exception is a fault of the program and ends its rank.
    """
    result, message = None, None
    try:
        result = action()
    except (OSError, ValueError) as error:
        message = str(error)
        cause = error
    messages: list[str | None] = [None] * group.size()
    dist.all_gather_object(messages, message, group=group)
    raised = list(dict.fromkeys(m for m in messages if m is not None))
    if raised:
        raise CheckpointError("; ".join(raised[:4])) from (cause if message else None)
    return result


def on_first_rank(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 of `group` and gives its result to all.

    Raises:
        CheckpointError: on all ranks alike if it raised `OSError` or `ValueError`.
    """
    result, message, cause = None, None, None
    if group.rank() == 0:
        try:
            result = action()
        except (OSError, ValueError) as error:
            message, cause = str(error), error
    payload = [(result, message)]
    dist.broadcast_object_list(payload, group_src=0, group=group)
    result, message = payload[0]
    if message is not None:
        raise CheckpointError(message) from cause
    return result
