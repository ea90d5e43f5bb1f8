"""A model folder as something that answers text: `create_inference_engine`, whatever the back end.

    engine = create_inference_engine("folder")
    engine.generate(["The capital of France is"], SamplingParams(temperature=0))
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_rl import cuda_on_cpu
from megatron_rl.config import ConfigError
from megatron_rl.convert.kinds import open_model
from megatron_rl.convert.load import load_weights
from megatron_rl.generation.async_engine import AsyncEngine
from megatron_rl.generation.engine import Engine, EngineSettings
from megatron_rl.generation.sequence import Response, SamplingParams
from megatron_rl.hub import Named, model_folder
from megatron_rl.models.gpt import build_model
from megatron_rl.once_per_node import NodeRank
from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel
from megatron_rl.runtime import Environment
from megatron_rl.text import TextTokenizer, Tokenizer

BACKENDS = ("megatron", "huggingface", "vllm")
Prompts = list[str] | list[list[int]]


class TextEngine(Protocol):
    """Answers prompts; the same interface for every back end."""

    tokenizer: Tokenizer

    def generate(
        self, prompts: Prompts, sampling: SamplingParams | None = None, *, n: int = 1
    ) -> list[Response]:
        """`n` responses per prompt (text or token ids), in order.

        The tokenizer's end tokens stop a response unless `sampling` names stop ids itself. A
        request that can't be served has finish_reason "error"; the others go on.
        """


class MegatronTextEngine:
    """The training engine's generation over a frozen model; all ranks call it alike."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    @functools.cached_property
    def asynchronous(self) -> AsyncEngine:
        """For requests that come and go; on several ranks, all but the first `follow()` it."""
        return AsyncEngine(self.engine)

    def generate(
        self, prompts: Prompts, sampling: SamplingParams | None = None, *, n: int = 1,
        requests: list[int] | None = None, on_error: str = "return",
    ) -> list[Response]:  # fmt: skip
        """See TextEngine; `requests` and `on_error` as in Engine.generate."""
        sampling = with_end_ids(sampling, self.tokenizer)
        return self.engine.generate(
            token_ids(prompts, self.tokenizer), sampling, n=n, requests=requests, on_error=on_error
        )

    def stream(
        self, prompt: str | list[int], sampling: SamplingParams | None = None, *, request: int = 0
    ) -> Iterator[str]:
        """The text of one response, piece by piece."""
        sampling = with_end_ids(sampling, self.tokenizer)
        ids = token_ids([prompt], self.tokenizer)[0]
        pieces = TextPieces(self.tokenizer)
        for token in self.engine.stream(ids, sampling, request):
            yield pieces.add(token)
        yield pieces.rest()

    async def agenerate(
        self, prompt: str | list[int], sampling: SamplingParams | None = None
    ) -> Response:
        """One response, while others run; see `asynchronous` for several ranks.

        Raises:
            ValueError: the request can't be served; others go on.
        """
        ids = token_ids([prompt], self.tokenizer)[0]
        return await self.asynchronous.generate(ids, with_end_ids(sampling, self.tokenizer))

    async def astream(
        self, prompt: str | list[int], sampling: SamplingParams | None = None
    ) -> AsyncIterator[str]:
        """The text of one response, piece by piece, while others run."""
        pieces = TextPieces(self.tokenizer)
        ids = token_ids([prompt], self.tokenizer)[0]
        async for token in self.asynchronous.stream(ids, with_end_ids(sampling, self.tokenizer)):
            yield pieces.add(token)
        yield pieces.rest()


class TextPieces:
    """Text of tokens as they come: a character of several tokens is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._ids, self._given = tokenizer, [], ""

    def add(self, token: int) -> str:
        """What can be shown now."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._piece(text)

    def rest(self) -> str:
        """What was held back."""
        return self._piece(self._tokenizer.decode(self._ids))

    def _piece(self, text: str) -> str:
        piece, self._given = text[len(self._given) :], text
        return piece


def token_ids(prompts: Prompts, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts as ids; text is taken as it stands."""
    return [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]


def with_end_ids(sampling: SamplingParams | None, tokenizer: Tokenizer) -> SamplingParams:
    """The tokenizer's end tokens, where no stop ids are given."""
    sampling = sampling or SamplingParams()
    if sampling.stop_token_ids:
        return sampling
    return replace(sampling, stop_token_ids=tokenizer.end_ids)


def create_inference_engine(
    model_path: str | Path, backend: str = "megatron", tensor_parallel_size: int = 1,
    *, pipeline_parallel_size: int = 1, dtype: str = "fp32", role: str = "actor",
    revision: str | None = None, settings: EngineSettings | None = None,
    trust_remote_code: bool = False,
) -> TextEngine:  # fmt: skip
    """Loads a model folder or hub id for generation on the ranks of this program.

    Without a process group one is started: of one rank, or of those that torchrun started. With
    more ranks than the layout needs, the others are further replicas.

    Args:
        model_path: a Hugging Face folder, a Megatron checkpoint, or a step of a run.
        backend: "megatron" (this process's own engine), "huggingface" (transformers, one rank), or
            "vllm" (imported only then).
        role: whose weights to take where a checkpoint holds several.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: let the tokenizer's own Python code run.

    Raises:
        ValueError: for an unknown back end, a layout that does not fit the ranks, or a folder that
            can't be read.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    named = Named(
        name=str(model_path), revision=revision, setting="model_path", revision_setting="revision"
    )
    path = model_folder(named, NodeRank.read(), trust_remote_code=trust_remote_code)
    if backend != "megatron":
        from megatron_rl import inference_peers

        return inference_peers.create(
            backend, path, tensor_parallel_size, dtype, trust_remote_code
        )
    folder = open_model(path, role)
    folder.check()
    tokenizer = TextTokenizer(folder.companion_folder, trust_remote_code=trust_remote_code)
    join_ranks()
    layout = Layout(
        world_size=dist.get_world_size(), tp=tensor_parallel_size, pp=pipeline_parallel_size
    )
    groups = ParallelGroups(layout=layout)
    seed_model_parallel(0, groups)
    model = build_model(role, folder.architecture, groups, dtype=dtype)
    load_weights(model, folder, show=dist.get_rank() == 0)
    return MegatronTextEngine(Engine(model, settings, tokenizer.decode), tokenizer)


def join_ranks() -> None:
    """A process group over the ranks that a launcher started, or of this process alone."""
    cuda_on_cpu.enable()
    if dist.is_initialized():
        return
    env = Environment.read()
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > env.local_rank
    if on_gpu:
        torch.cuda.set_device(env.local_rank)
    backend = "nccl" if on_gpu else "gloo"
    if env.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {env.world_size} but MASTER_PORT is not set; start the ranks with "
            "torchrun"
        )
    else:
        dist.init_process_group(backend, rank=env.rank, world_size=env.world_size)
