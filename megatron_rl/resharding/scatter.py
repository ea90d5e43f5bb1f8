"""Spreads a replica's samples over the generation replicas inside it, and gathers the responses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

import torch.distributed as dist

from megatron_rl.generation.engine import Engine
from megatron_rl.generation.sequence import Response, SamplingParams
from megatron_rl.stopping import StopNow


def share_out(prompts: Sequence[Sequence[int]], parts: int) -> list[list[int]]:
    """Indices of the samples that each of `parts` replicas generates.

    The number of samples differs by at most one where prompts have equally many: decoding costs by
    the sequence. Samples of one prompt stand next to each other and stay together, so that their
    prefix is computed once; only the last, shortest prompts that do not divide are split. Long
    prompts are dealt back and forth, which evens out the prefill.
    """
    runs = [
        [index for index, _ in run]
        for _, run in groupby(enumerate(prompts), key=lambda item: tuple(item[1]))
    ]
    runs.sort(key=lambda run: -len(prompts[run[0]]))
    whole = len(runs) // parts * parts
    shares: list[list[int]] = [[] for _ in range(parts)]
    for number, run in enumerate(runs[:whole]):
        lap, place = divmod(number, parts)
        shares[place if lap % 2 == 0 else parts - 1 - place] += run
    for index in chain.from_iterable(runs[whole:]):
        min(shares, key=len).append(index)
    return [sorted(share) for share in shares]


def generate_scattered(
    engine: Engine, prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams], *, requests: Sequence[int],
) -> list[Response]:  # fmt: skip
    """`Engine.generate` over the replicas inside a training replica.

    Every rank of the training replica calls this with the same arguments and gets all responses,
    in order. `requests` key the noise, so that a sample does not depend on where it is drawn.

    Raises:
        StopNow: on all of them alike, if one of the replicas inside was told to stop.
    """
    groups = engine.model.groups
    parts, group = groups.layout.inner_replicas, groups.inner_control()
    mine = share_out(prompts, parts)[groups.dp_rank % parts]
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    piece: dict[int, Response] | None = None
    try:
        responses = engine.generate(
            [list(prompts[i]) for i in mine], [each[i] for i in mine],
            requests=[requests[i] for i in mine],
        )  # fmt: skip
        piece = dict(zip(mine, responses, strict=True))
    except StopNow:
        pass  # the other replicas inside wait for this one's part
    pieces: list[dict[int, Response] | None] = [None] * parts
    dist.all_gather_object(pieces, piece, group=group)
    if None in pieces:
        raise StopNow
    found = {index: response for part in pieces for index, response in part.items()}
    return [found[index] for index in range(len(prompts))]
