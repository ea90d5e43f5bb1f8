"""What is generated: sampling parameters, a request's state, and the finished response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from megatron_rl.generation.blocks import BlockTable
from megatron_rl.generation.transfer import ToHost


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        temperature: divides the logits; 0 is greedy, with log-probs of the untempered softmax.
        top_k, top_p: 0 and 1.0 keep every token.
        max_new_tokens, max_length: response and prompt + response limits; the smaller wins.
        min_new_tokens: end tokens are not sampled before this many tokens.
        stop_token_ids: ids that end the response (the id itself is part of it).
        stop: texts that end the response with the token that completes them (they are part of it).
        ignore_eos: end only at the length limit.
        seed: noise of the draw, together with the request id and the position.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    max_length: int | None = None
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "stop": (all(self.stop), "a list of texts that are not empty"),
            "min_new_tokens": (
                0 <= self.min_new_tokens <= self.max_new_tokens, "0 … max_new_tokens"
            ),
        }  # fmt: skip
        for name, (good, rule) in rules.items():
            if not good:
                raise ValueError(f"sampling: {name} is {getattr(self, name)}: it must be {rule}")


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One request while it is generated.

    Attributes:
        request: number that keys the sampling noise; unique within a batch over all replicas.
        tokens: prompt and what was generated so far.
        computed: tokens whose keys and values are in the cache.
        table: blocks of the cache, in order.
        decode: ids → text, for stop texts.
        followers: further samples of the same prompt, which fork from this one once the prompt is
            computed.
        slot: micro-batch of the pipeline that it runs in.
        delivered: generated tokens that a stream has passed on.
        ahead: tokens that launched steps will add; the host does not know them yet.
        newest: where the last of them appears on the device: results [3, K, B] and column.
        routes: see Response.
    """

    request: int
    prompt_length: int
    tokens: list[int]
    sampling: SamplingParams
    limit: int
    computed: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    decode: Callable[[list[int]], str] | None = None
    followers: list[Sequence] = field(default_factory=list)
    slot: int = 0
    delivered: int = 0
    ahead: int = 0
    newest: tuple[Tensor, int] | None = None
    routes: ToHost | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def length(self) -> int:
        """Tokens once all launched steps are done; past `limit` they are thrown away."""
        return len(self.tokens) + self.ahead

    @property
    def pending(self) -> int:
        """Tokens that the next forward pass has to compute."""
        return self.length - self.computed

    @property
    def needs_host(self) -> bool:
        """Whether the host has a say in the next token or in whether it is the last."""
        return bool(self.sampling.stop) or self.held_back

    @property
    def held_back(self) -> bool:
        """Whether end tokens may not come next, because of `min_new_tokens`."""
        return self.generated + 1 < self.sampling.min_new_tokens

    def extend(
        self, tokens: list[int], logprobs: list[float], full_logprobs: list[float]
    ) -> None:
        """Takes sampled tokens up to the one that ends the response; the rest is thrown away."""
        count, reason = self._length_of_end(tokens)
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.full_logprobs += full_logprobs[:count]
        if reason is None and not self.sampling.ignore_eos and self._has_stop_text():
            reason = "stop"
        if reason is None and len(self.tokens) >= self.limit:
            reason = "length"
        self.finish_reason = reason

    def _length_of_end(self, tokens: list[int]) -> tuple[int, str | None]:
        """How many of the new tokens count, and "stop" if the last of them is an end token."""
        count = min(len(tokens), self.limit - len(self.tokens))
        if not self.sampling.ignore_eos and self.sampling.stop_token_ids:
            first = max(self.sampling.min_new_tokens - self.generated - 1, 0)
            for index in range(first, count):
                if tokens[index] in self.sampling.stop_token_ids:
                    return index + 1, "stop"
        return count, None

    def _has_stop_text(self) -> bool:
        """Whether a stop text ends in the last token; a token is at least one byte of text. (Such
        sequences get one token at a time.)"""
        if not self.sampling.stop or self.generated < self.sampling.min_new_tokens:
            return False
        longest = max(len(text.encode()) for text in self.sampling.stop)
        tail = self.decode(self.tokens[self.prompt_length :][-longest - 4 :])
        return any(text in tail for text in self.sampling.stop)

    def response(self) -> Response:
        return Response(
            request=self.request, prompt_ids=self.tokens[: self.prompt_length],
            token_ids=self.tokens[self.prompt_length :], logprobs=self.logprobs,
            full_logprobs=self.full_logprobs, finish_reason=self.finish_reason, routes=self.routes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A finished request.

    Attributes:
        logprobs: fp32 log-prob of each token under the distribution it was drawn from
            (temperature, top-k and top-p applied).
        full_logprobs: the same under the whole tempered softmax.
        finish_reason: "stop" (an end token or text), "length" (cut), "abort" or "error".
        error: what is wrong with the request, for "error".
        routes: int16 `[layers of this rank, tokens - 1, K]`, the experts that each token but the
            last took (mixture of experts, where the engine keeps them).
    """

    request: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    full_logprobs: list[float]
    finish_reason: str
    error: str | None = None
    routes: ToHost | None = None
