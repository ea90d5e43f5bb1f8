"""Checks requests against the model before anything is computed for them."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.generation.sequence import Response, SamplingParams, Sequence
from megatron_rl.models.gpt import ParallelModel


def make_sequence(
    request: int, prompt: list[int], params: SamplingParams, model: ParallelModel,
    decode: Callable[[list[int]], str] | None = None,
) -> Sequence:  # fmt: skip
    """A request as the scheduler takes it.

    Raises:
        ValueError: for an empty prompt, an id outside the vocabulary, a prompt that leaves no room
            in the context or is longer than the window, or stop texts without a tokenizer.
    """
    arch, window = model.arch, model.config.window
    if not prompt:
        raise ValueError(f"request {request}: the prompt is empty; give at least one token")
    bad = next((t for t in prompt if not 0 <= t < arch.vocab), None)
    if bad is not None:
        raise ValueError(
            f"request {request}: token id {bad} is outside the vocabulary of {arch.vocab}; "
            "the tokenizer does not belong to this model"
        )
    if window is not None and len(prompt) > window:
        raise ValueError(
            f"request {request}: the prompt has {len(prompt)} tokens, more than "
            f"rollout.max_cache_len = {window}; shorten it or raise the limit"
        )
    limits = (len(prompt) + params.max_new_tokens, params.max_length, arch.max_positions)
    limit = min(x for x in limits if x is not None)
    if limit <= len(prompt):
        raise ValueError(
            f"request {request}: the prompt has {len(prompt)} tokens and leaves no room in a "
            f"context of {min(limits[1] or limit, arch.max_positions)}; shorten it or raise "
            "rollout.max_length (at most the model's max_position_embeddings)"
        )
    if params.stop and decode is None:
        raise ValueError(
            f"request {request}: stop texts {params.stop} need a tokenizer; use stop_token_ids or "
            "give the engine one"
        )
    return Sequence(
        request=request, prompt_length=len(prompt), tokens=list(prompt), sampling=params,
        limit=limit, decode=decode,
    )  # fmt: skip


def refusal(request: int, prompt: list[int], error: ValueError) -> Response:
    """The response to a request that can't be served."""
    return Response(
        request=request, prompt_ids=list(prompt), token_ids=[], logprobs=[], full_logprobs=[],
        finish_reason="error", error=str(error),
    )  # fmt: skip
