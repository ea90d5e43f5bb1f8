"""A user's own advantage estimator or policy loss, named `module:function` in the configuration.

Both are pure functions, called with keyword arguments of exactly these names:

    def advantages(scores_B, rewards_BR, values_BR, mask_BR, group_B):
        # Score against the prompt's best answer, the same for every token of a response.
        advantages_BR = torch.zeros_like(rewards_BR)
        for group in group_B.unique():
            rows = group_B == group
            gap_B = scores_B[rows] - scores_B[rows].max()
            advantages_BR[rows] = gap_B[:, None] * mask_BR[rows]
        return advantages_BR, {"best_score": scores_B.max()}

    def policy_loss(logp, old_logp, advantages, weights):
        # Plain policy gradient; `weights` already hold the global normalisation.
        loss_sum = -(weights * torch.exp(logp - old_logp) * advantages).sum()
        return loss_sum, {"policy_loss": loss_sum.detach(), "tokens": (weights != 0).sum()}

scores_B is each response's score, rewards_BR the per-token rewards (KL and score), values_BR the
critic's values (None without a critic), mask_BR 1 on trained tokens, group_B the prompt of each
row. logp, old_logp, advantages and weights have one shape, padded or packed; a weight of 0 marks an
untrained token. Metrics follow the key suffixes of `metrics.py`.

Shape suffixes: B sequences, R response positions.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

ADVANTAGE_FUNCTION_ARGS = ("scores_B", "rewards_BR", "values_BR", "mask_BR", "group_B")
POLICY_LOSS_FUNCTION_ARGS = ("logp", "old_logp", "advantages", "weights")


def load_function(name: str, required_args: Sequence[str]) -> Callable[..., Any]:
    """Import `module:function` and check that it can be called with `required_args` by keyword.

    Arguments of its own need defaults. Anything else is a `ValueError` that shows the signature
    expected, so that a run is refused at its start and not at its first update.
    """
    expected = f"def {{}}({', '.join(required_args)})"
    module_name, separator, function_name = name.partition(":")
    if not (separator and module_name and function_name):
        raise ValueError(
            f"{name!r} does not name a function; write it as module:function, a function of the "
            f"form {expected.format('function')}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{name!r}: can't import module {module_name!r} ({error}); it must be on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{name!r}: module {module_name!r} has no function {function_name!r}")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(required_args))
    except TypeError as error:
        raise ValueError(
            f"{name!r} has the signature {function_name}{signature} ({error}); expected "
            f"{expected.format(function_name)}, further arguments with defaults"
        ) from error
    return function
