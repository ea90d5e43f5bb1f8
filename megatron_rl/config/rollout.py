"""Settings of the prompts, of generation, of the reward and of the evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .algorithm import FUNCTION_FORM
from .schema import SECTION, setting


@dataclass(**SECTION)
class DataSettings:
    """The prompts."""

    train: str = setting("")
    """JSONL or Parquet file(s) of training prompts or a hub id; rewards see each row as object."""
    eval: str | None = setting(None)
    """JSONL or Parquet file(s) of held-out prompts or a hub id; null: no evaluation."""
    revision: str | None = setting(None)
    """Branch, tag or commit of the data sets' hub ids; null takes the default branch."""
    prompt_key: str = setting("prompt")
    """Key of the prompt in a line."""
    chat_template: bool = setting(False)
    """Wrap the prompt in the tokenizer's chat template; false feeds it as it stands."""
    shuffle: bool = setting(True)
    """Draw the training prompts in a seeded random order, a new one each pass."""
    max_prompt_length: int | None = setting(None, at_least=1)
    """Longest prompt in tokens; a longer one is an error. null: only the context limits it."""


@dataclass(**SECTION)
class RolloutSettings:
    """Generation of the responses that are trained on."""

    batch_size: int = setting(64, at_least=1)
    """Prompts per step over all data parallel replicas."""
    n: int = setting(1, at_least=1)
    """Responses per prompt."""
    temperature: float = setting(1.0, at_least=0)
    """Divides the logits, in generation and in training; 0 is greedy."""
    top_k: int = setting(0, at_least=0)
    """Sample among the k likeliest tokens; 0: all."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Sample among the likeliest tokens whose probability sums to this; 1: all."""
    max_new_tokens: int = setting(256, at_least=1)
    """Longest response in tokens."""
    max_length: int | None = setting(None, at_least=2)
    """Longest prompt + response in tokens; with max_new_tokens, the smaller limit wins."""
    min_new_tokens: int = setting(0, at_least=0)
    """End tokens are not sampled before this many tokens."""
    stop_token_ids: list[int] = setting([], at_least=0)
    """Token ids that end a response, beside the model's own end tokens."""
    stop: list[str] = setting([], form=(r"(?s).+", "a non-empty text"))
    """Texts that end a response."""
    max_cache_len: int | None = setting(None, at_least=1)
    """Tokens that attention sees, in training too; older ones leave the cache; null: all."""
    block_size: int = setting(16, at_least=1)
    """Tokens per block of the paged KV cache."""
    kv_cache_gb: float | None = setting(None, above=0)
    """Memory of the KV cache per rank in GB (10^9 bytes); null: kv_memory_fraction decides."""
    kv_memory_fraction: float = setting(0.8, above=0, at_most=1)
    """Share of the free device memory that the KV cache takes when kv_cache_gb is null."""
    max_batch_tokens: int = setting(8192, at_least=1)
    """Tokens that one prefill pass may hold."""
    max_running: int = setting(256, at_least=1)
    """Sequences that decode at the same time on one replica."""
    decode_burst: int | None = setting(None, at_least=1)
    """Decode passes before the host looks; changes no result; null: 8 on a GPU, else 1."""
    cuda_graphs: bool = setting(True)
    """Capture decode passes as CUDA graphs."""
    backend: Literal["megatron", "vllm"] = setting("megatron")
    """Engine that generates; megatron runs on the training shards."""
    prefix_sharing: bool = setting(True)
    """Samples of one prompt share the KV blocks of the prompt."""
    router_replay: bool = setting(True)
    """Training takes the experts that generation took (mixture of experts; else without effect)."""

    def longest_sequence(self, max_prompt_length: int | None) -> int | None:
        """Tokens of the longest prompt + response, None when no setting bounds it."""
        bounds = [] if self.max_length is None else [self.max_length]
        if max_prompt_length is not None:
            bounds.append(max_prompt_length + self.max_new_tokens)
        return min(bounds, default=None)


@dataclass(**SECTION)
class RewardSettings:
    """The reward function."""

    function: str | None = setting(None, form=FUNCTION_FORM)
    """Function that scores a batch: module:function or file.py:function. Adds to model.reward."""
    kwargs: dict[str, Any] = setting({})
    """Keyword arguments for the function."""


@dataclass(**SECTION)
class EvaluationSettings:
    """Evaluation on the held-out prompts with the training reward."""

    interval: int | None = setting(None, at_least=1)
    """Evaluate every this many steps; null: never in between."""
    at_start: bool = setting(False)
    """Evaluate before the first step."""
    at_end: bool = setting(False)
    """Evaluate after the last step."""
    prompts: int | None = setting(None, at_least=1)
    """Use the first this many held-out prompts; null: all."""
    temperature: float = setting(1.0, at_least=0)
    """Sampling temperature in evaluation; 0 is greedy."""
    batch_size: int | None = setting(None, at_least=1)
    """Prompts per generation call over all replicas; null: rollout.batch_size."""
