"""Reward functions that come with the package; each also shows how to write one."""

from __future__ import annotations

import re
from typing import Any


def first_integer_exact(
    prompts: list[str], responses: list[str], records: list[dict[str, Any]]
) -> list[float]:
    """1 where the first integer of the response equals the record's `answer`, else 0."""
    scores = []
    for response, record in zip(responses, records, strict=True):
        found = re.search(r"-?\d+", response)
        scores.append(float(found is not None and int(found.group()) == int(record["answer"])))
    return scores
