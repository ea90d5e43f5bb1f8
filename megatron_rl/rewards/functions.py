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


def length_in_characters(
    prompts: list[str], responses: list[str], records: list[dict[str, Any]], target: int = 20
) -> list[float]:
    """1 at `target` characters, falling linearly to 0 at twice that or at nothing: a reward that
    needs no data, for trying things out."""
    return [max(0.0, 1.0 - abs(len(r) - target) / target) for r in responses]
