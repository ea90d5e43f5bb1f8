"""Several decode passes in a row whose state never leaves the device.

One pass takes the pending token of each sequence, writes its keys and values, attends, draws the
next token and advances. The host only says how often; it looks at the tokens afterwards. The same
body runs eagerly or, on CUDA, as a captured graph, with the same results.

Shapes: B sequences (padded to a captured size), N blocks per sequence, K passes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.generation.blocks import DROPPED
from megatron_rl.generation.cache import KVCache
from megatron_rl.generation.sampler import SamplingBatch, draw, pack
from megatron_rl.generation.scheduler import Step
from megatron_rl.kernels.rope_kv_write import rope_table
from megatron_rl.models.attention import AttentionBatch, PagedCache, inverse_frequencies
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.models.inference_forward import stage_forward

log = logging.getLogger("megatron_rl")
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(kw_only=True, slots=True)
class DecodeState:
    """State of the sequences of a decode step, all on the device.

    Attributes:
        token_B: int64, the pending token.
        position_B: int64, its position.
        table_BN: int32 block table; DROPPED rows belong to no sequence and write nothing.
        sampling: what the draws need.
        out_3KB: fp64 results of the passes.
        pass_1: int64, number of the next pass.
    """

    token_B: Tensor
    position_B: Tensor
    table_BN: Tensor
    sampling: SamplingBatch
    out_3KB: Tensor
    pass_1: Tensor

    def copy_from(self, other: DecodeState) -> None:
        """Takes over a state with at most as many sequences and blocks."""
        count, width = other.table_BN.shape
        self.table_BN.fill_(DROPPED)
        self.table_BN[:count, :width] = other.table_BN
        self.token_B[:count] = other.token_B
        self.position_B.zero_()
        self.position_B[:count] = other.position_B
        self.sampling.temperature_B[:count] = other.sampling.temperature_B
        self.sampling.stream_B[:count] = other.sampling.stream_B
        self.pass_1.zero_()


class DecodeLoop:
    """Decodes on one pipeline stage that is the whole model."""

    def __init__(self, model: ParallelModel, cache: KVCache, *, cuda_graphs: bool) -> None:
        self.model, self.cache, self.device = model, cache, model.device
        self.graphs: dict[tuple[int, int, int], tuple[torch.cuda.CUDAGraph, DecodeState]] = {}
        self.use_graphs = cuda_graphs and self.device.type == "cuda"
        self.capture_seconds = 0.0
        self.rope_PR = None
        if model.config.window is None and cache.kernels_fit(cache.keys[0]):
            frequencies = inverse_frequencies(model.arch.head_dim, model.arch.rope)
            self.rope_PR = rope_table(frequencies.to(self.device), model.arch.max_positions)

    def run(self, step: Step) -> Tensor:
        """`step.decodes` passes; returns the results [3, K, B] (see Launched.packed_3KB)."""
        state = self._state(step)
        longest = max(len(s.tokens) for s in step.sequences)
        graph = self._graph(state, step.decodes) if self._graphable(state) else None
        if graph is None:
            for index in range(step.decodes):
                self._body(state, longest + index)
            return state.out_3KB
        captured, static = graph
        static.copy_from(state)
        for _ in range(step.decodes):
            captured.replay()
        return static.out_3KB[:, : step.decodes, : len(step.sequences)].clone()

    def _state(self, step: Step) -> DecodeState:
        size, sequences = self.cache.shape.block_size, step.sequences
        width = max(-(-(len(s.tokens) + step.decodes - 1) // size) for s in sequences)
        rows = [s.table.blocks[:width] for s in sequences]
        table = [row + [DROPPED] * (width - len(row)) for row in rows]
        kwargs = dict(device=self.device)
        return DecodeState(
            token_B=torch.tensor([s.tokens[-1] for s in sequences], **kwargs),
            position_B=torch.tensor([len(s.tokens) - 1 for s in sequences], **kwargs),
            table_BN=torch.tensor(table, dtype=torch.int32, **kwargs),
            sampling=SamplingBatch.of(sequences, self.model),
            out_3KB=torch.empty((3, step.decodes, len(sequences)), dtype=torch.float64, **kwargs),
            pass_1=torch.zeros(1, dtype=torch.int64, **kwargs),
        )  # fmt: skip

    def _body(self, state: DecodeState, max_context: int) -> None:
        """One pass; no value is read by the host."""
        size, count = self.cache.shape.block_size, len(state.token_B)
        position_B, table_BN = state.position_B, state.table_BN
        block_B = table_BN.gather(1, (position_B // size)[:, None])[:, 0].long()
        slots_B = torch.where(block_B < 0, -1, block_B * size + position_B % size)
        cache = PagedCache(
            keys=self.cache.keys, values=self.cache.values, slots_T=slots_B,
            block_table_BN=table_BN.clamp(min=0), max_context=max_context,
            context_B=torch.where(block_B < 0, 0, position_B + 1).int(), rope_PR=self.rope_PR,
        )  # fmt: skip
        batch = AttentionBatch(
            positions_T=position_B, lengths=[1] * count, cache=cache,
            cu_seqlens_B1=torch.arange(count + 1, dtype=torch.int32, device=self.device),
        )  # fmt: skip
        logits_BV = stage_forward(self.model.chunks[0], state.token_B, None, batch)
        sample = draw(logits_BV, position_B + 1, state.sampling, self.model)
        state.out_3KB.index_copy_(1, state.pass_1, pack(sample)[:, None])
        state.token_B.copy_(sample.token_T)
        state.position_B += 1
        state.pass_1 += 1

    # ---- CUDA graphs ---------------------------------------------------------------------------

    def _graphable(self, state: DecodeState) -> bool:
        plain = not state.sampling.truncated and state.sampling.held_back is None
        return self.use_graphs and plain and self.rope_PR is not None

    def _graph(
        self, state: DecodeState, passes: int
    ) -> tuple[torch.cuda.CUDAGraph, DecodeState] | None:
        """The graph of the next larger size, captured on first use; None above the largest."""
        count, width = state.table_BN.shape
        size = next((s for s in GRAPH_SIZES if s >= count), None)
        if size is None:
            return None
        key = (size, 1 << (width - 1).bit_length(), 1 << (passes - 1).bit_length())
        if key not in self.graphs:
            self.graphs[key] = self._capture(*key)
        return self.graphs[key]

    def _capture(
        self, count: int, width: int, passes: int
    ) -> tuple[torch.cuda.CUDAGraph, DecodeState]:
        begin, kwargs = time.perf_counter(), dict(device=self.device)
        state = DecodeState(
            token_B=torch.zeros(count, dtype=torch.int64, **kwargs),
            position_B=torch.zeros(count, dtype=torch.int64, **kwargs),
            table_BN=torch.full((count, width), DROPPED, dtype=torch.int32, **kwargs),
            sampling=SamplingBatch(
                temperature_B=torch.ones(count, **kwargs),
                stream_B=torch.zeros(count, dtype=torch.int64, **kwargs), truncated=[],
                held_back=None,
            ),
            out_3KB=torch.empty((3, passes, count), dtype=torch.float64, **kwargs),
            pass_1=torch.zeros(1, dtype=torch.int64, **kwargs),
        )  # fmt: skip
        longest = width * self.cache.shape.block_size
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile and libraries allocate outside the capture
            for _ in range(2):
                state.pass_1.zero_()
                self._body(state, longest)
        torch.cuda.current_stream().wait_stream(side)
        state.pass_1.zero_()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved()
        with torch.cuda.graph(graph):
            self._body(state, longest)
        seconds = time.perf_counter() - begin
        self.capture_seconds += seconds
        log.info(
            "captured decode of %d sequences × %d blocks in %.2f s, %.0f MB",
            count, width, seconds, (torch.cuda.memory_reserved() - before) / 1e6,
        )  # fmt: skip
        return graph, state
