"""A model folder as something that answers text: `create_inference_engine` and its `generate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from megatron_rl.convert.huggingface import load_huggingface
from megatron_rl.generation.engine import Engine, EngineSettings
from megatron_rl.generation.sequence import Response, SamplingParams
from megatron_rl.hub import Named, model_folder
from megatron_rl.models.families import read_architecture
from megatron_rl.models.gpt import build_model
from megatron_rl.once_per_node import NodeRank
from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel
from megatron_rl.text import TextTokenizer, Tokenizer

BACKENDS = ("megatron", "huggingface", "vllm")


class TextEngine(Protocol):
    """Answers prompts; the same interface for every back end."""

    def generate(
        self, prompts: list[str] | list[list[int]], sampling: SamplingParams | None = None
    ) -> list[Response]: ...


class MegatronTextEngine:
    """The training engine's generation over a frozen model."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    def generate(
        self, prompts: list[str] | list[list[int]], sampling: SamplingParams | None = None
    ) -> list[Response]:
        """One response per prompt (text or token ids), in order.

        The tokenizer's end tokens stop a response unless `sampling` names stop ids itself.
        """
        sampling = sampling or SamplingParams()
        if not sampling.stop_token_ids:
            sampling = replace(sampling, stop_token_ids=self.tokenizer.end_ids)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
        return self.engine.generate(ids, sampling)


def create_inference_engine(
    model_path: str | Path, backend: str = "megatron", tensor_parallel_size: int = 1,
    *, revision: str | None = None, trust_remote_code: bool = False, dtype: str = "fp32",
    settings: EngineSettings | None = None,
) -> TextEngine:  # fmt: skip
    """Loads a Hugging Face folder or hub id for generation on the ranks of this program.

    Without a process group a one-rank one is started; with several ranks, those beyond
    `tensor_parallel_size` are further replicas.

    Args:
        revision: branch, tag or commit of a hub id.
        trust_remote_code: let the tokenizer's own Python code run.

    Raises:
        ValueError: for an unknown back end, a size that does not divide the ranks, or a folder that
            can't be read.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend != "megatron":
        raise ValueError(
            f"backend {backend!r} is not supported yet; use backend='megatron', which generates in "
            "this process"
        )
    from megatron_rl import cuda_on_cpu

    named = Named(
        name=str(model_path), revision=revision, setting="model_path", revision_setting="revision"
    )
    folder = model_folder(named, NodeRank.read(), trust_remote_code=trust_remote_code)
    tokenizer = TextTokenizer(folder, trust_remote_code=trust_remote_code)
    cuda_on_cpu.enable()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout = Layout(world_size=dist.get_world_size(), tp=tensor_parallel_size)
    groups = ParallelGroups(layout=layout)
    seed_model_parallel(0, groups)
    model = build_model("actor", read_architecture(folder), groups, dtype=dtype)
    load_huggingface(model, folder)
    return MegatronTextEngine(Engine(model, settings), tokenizer)
