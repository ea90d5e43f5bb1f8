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
from megatron_rl.generation.sequence import Sequence
from megatron_rl.generation.transfer import to_device
from megatron_rl.models.attention import AttentionBatch, PagedCache
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.models.inference_forward import stage_forward

log = logging.getLogger("megatron_rl")
# Captured numbers of sequences, and of blocks: what attention walks without a merge (512 tokens of
# 16-token blocks), then in wide steps. A table wider than needed costs launches that end at once.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
GRAPH_WIDTHS = tuple(32 * 4**k for k in range(8))


@dataclass(kw_only=True, slots=True)
class DecodeState:
    """State of the sequences of a decode step, all on the device.

    Attributes:
        token_B: int64, the pending token.
        position_B: int64, its position.
        table_BN: int32 block table.
        end_B: int64, tokens that the sequence's blocks hold; a sequence past them goes on to the
            end of the burst, writes nothing and is looked at by nobody. 0: no sequence.
        sampling: what the draws need.
        out_3KB: fp64 results of the passes.
        pass_1: int64, number of the next pass.
    """

    token_B: Tensor
    position_B: Tensor
    table_BN: Tensor
    end_B: Tensor
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
        self.end_B.zero_()
        self.end_B[:count] = other.end_B
        self.sampling.temperature_B[:count] = other.sampling.temperature_B
        self.sampling.stream_B[:count] = other.sampling.stream_B
        self.pass_1.zero_()


class DecodeLoop:
    """Decodes on one pipeline stage that is the whole model.

    Args:
        rope_PR: see PagedCache; None: plain torch.
        burst: most passes of a step.
    """

    def __init__(
        self, model: ParallelModel, cache: KVCache, *, rope_PR: Tensor | None, burst: int,
        cuda_graphs: bool,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.device = model, cache, model.device
        self.burst = burst
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, DecodeState]] = {}
        self._pool = None  # one for all graphs: nothing inside outlives a replay
        self.use_graphs = cuda_graphs and self.device.type == "cuda"
        self.capture_seconds = 0.0
        self.rope_PR = rope_PR

    def run(self, step: Step) -> Tensor:
        """`step.decodes` passes; returns the results [3, K, B] (see Launched.packed_3KB)."""
        state = self._state(step)
        longest = max(s.length for s in step.sequences)
        graph = self._graph(state) if self._graphable(state) else None
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
        ends = [min(s.length + step.decodes - 1, s.limit) for s in sequences]
        width = max(-(-end // size) for end in ends)
        rows = [s.table.blocks[:width] for s in sequences]
        limit = self.model.arch.max_positions
        table = [row + [DROPPED] * (width - len(row)) for row in rows]
        kwargs = dict(device=self.device)
        return DecodeState(
            token_B=self._tokens(sequences),
            position_B=to_device([s.length - 1 for s in sequences], self.device),
            table_BN=to_device(table, self.device, torch.int32),
            end_B=to_device([min(len(row) * size, limit) for row in rows], self.device),
            sampling=SamplingBatch.of(sequences, self.model),
            out_3KB=torch.empty((3, step.decodes, len(sequences)), dtype=torch.float64, **kwargs),
            pass_1=torch.zeros(1, dtype=torch.int64, **kwargs),
        )  # fmt: skip

    def _tokens(self, sequences: list[Sequence]) -> Tensor:
        """The pending tokens; those that the host does not know yet come from the device."""
        token_B = to_device([s.tokens[-1] for s in sequences], self.device)
        flying = [(row, *s.newest) for row, s in enumerate(sequences) if s.ahead]
        for packed_3KB in {id(packed): packed for _, packed, _ in flying}.values():
            pairs = [(row, column) for row, packed, column in flying if packed is packed_3KB]
            rows, columns = to_device(pairs, self.device).unbind(1)
            token_B[rows] = packed_3KB[0, -1, columns].long()
        return token_B

    def _body(self, state: DecodeState, max_context: int) -> None:
        """One pass; no value is read by the host."""
        live_B = state.position_B < state.end_B
        position_B = torch.where(live_B, state.position_B, 0)
        cache = PagedCache(
            keys=self.cache.keys, values=self.cache.values, block_table_BN=state.table_BN,
            context_B=torch.where(live_B, position_B + 1, 0).int(), max_context=max_context,
            rope_PR=self.rope_PR, decode=self.rope_PR is not None,
        )  # fmt: skip
        batch = AttentionBatch(positions_T=position_B, lengths=[1] * len(position_B), cache=cache)
        if not cache.decode:  # plain torch wants to be told where and what
            size = self.cache.shape.block_size
            block_B = state.table_BN.gather(1, (position_B // size)[:, None])[:, 0].long()
            cache.slots_T = torch.where(live_B, block_B * size + position_B % size, -1)
            batch.cu_seqlens_B1 = torch.arange(
                len(position_B) + 1, dtype=torch.int32, device=self.device
            )
        logits_BV = stage_forward(self.model.chunks[0], state.token_B, None, batch)
        sample = draw(logits_BV, state.position_B + 1, state.sampling, self.model)
        state.out_3KB.index_copy_(1, state.pass_1, pack(sample)[:, None])
        state.token_B.copy_(sample.token_T)
        state.position_B += 1
        state.pass_1 += 1

    # ---- CUDA graphs ---------------------------------------------------------------------------

    def _graphable(self, state: DecodeState) -> bool:
        plain = not state.sampling.truncated and state.sampling.held_back is None
        return self.use_graphs and plain and self.rope_PR is not None

    def _graph(self, state: DecodeState) -> tuple[torch.cuda.CUDAGraph, DecodeState] | None:
        """The graph of the next larger size, captured on first use; None above the largest."""
        count, width = state.table_BN.shape
        size = next((s for s in GRAPH_SIZES if s >= count), None)
        if size is None:
            return None
        key = (size, next(w for w in GRAPH_WIDTHS if w >= width))
        if key not in self.graphs:
            self.graphs[key] = self._capture(*key)
        return self.graphs[key]

    def _capture(self, count: int, width: int) -> tuple[torch.cuda.CUDAGraph, DecodeState]:
        begin, kwargs = time.perf_counter(), dict(device=self.device)
        state = DecodeState(
            token_B=torch.zeros(count, dtype=torch.int64, **kwargs),
            position_B=torch.zeros(count, dtype=torch.int64, **kwargs),
            table_BN=torch.full((count, width), DROPPED, dtype=torch.int32, **kwargs),
            end_B=torch.zeros(count, dtype=torch.int64, **kwargs),
            sampling=SamplingBatch(
                temperature_B=torch.ones(count, **kwargs),
                stream_B=torch.zeros(count, dtype=torch.int64, **kwargs), truncated=[],
                held_back=None,
            ),
            out_3KB=torch.empty((3, self.burst, count), dtype=torch.float64, **kwargs),
            pass_1=torch.zeros(1, dtype=torch.int64, **kwargs),
        )  # fmt: skip
        longest = width * self.cache.shape.block_size
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile and libraries allocate outside the capture
            for _ in range(1 if self.graphs else 2):
                state.pass_1.zero_()
                self._body(state, longest)
        torch.cuda.current_stream().wait_stream(side)
        state.pass_1.zero_()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved()
        with torch.cuda.graph(graph, pool=self._pool):
            self._body(state, longest)
        self._pool = self._pool or graph.pool()
        seconds = time.perf_counter() - begin
        self.capture_seconds += seconds
        log.info(
            "captured decode of %d sequences × %d blocks in %.2f s, %.0f MB",
            count, width, seconds, (torch.cuda.memory_reserved() - before) / 1e6,
        )  # fmt: skip
        return graph, state
