"""Several decode passes in a row whose state never leaves the device.

One pass takes the pending token of each sequence, writes its keys and values, attends, draws the
next token and advances. The host only says how often; it looks at the tokens afterwards. The same
body runs eagerly or, on CUDA, as a captured graph, with the same results.

Shapes: B sequences (padded to a captured size), N blocks per sequence, K passes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
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
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
GRAPH_WIDTHS = tuple(32 * 4**k for k in range(8))


@dataclass(kw_only=True, slots=True)
class DecodeState:
    """State of the sequences of a decode step, all on the device.

    Attributes:
        token_B: int64, the pending token.
        position_B: int64, its position.
        places_BM: int32: the block table, and in the last column the tokens that its blocks hold.
            A sequence past them goes on to the end of the burst, writes nothing and is looked at
            by nobody. 0: a row without a sequence.
        sampling: what the draws need.
        out_3KB: fp64 results of the passes.
        pass_1: int64, number of the next pass.
    """

    token_B: Tensor
    position_B: Tensor
    places_BM: Tensor
    sampling: SamplingBatch
    out_3KB: Tensor
    pass_1: Tensor

    def copy_from(self, other: DecodeState) -> None:
        """Takes over a state of the same size."""
        self.token_B.copy_(other.token_B)
        self.position_B.copy_(other.position_B)
        self.places_BM.copy_(other.places_BM)
        self.sampling.temperature_B.copy_(other.sampling.temperature_B)
        self.sampling.stream_B.copy_(other.sampling.stream_B)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Captured:
    """A decode pass of fixed size over its own state: a CUDA graph, or on a CPU (where only the
    interpreter of Triton gets here) the pass itself."""

    replay: Callable[[], object]
    state: DecodeState
    rows: int
    width: int

    def fits(self, count: int, width: int) -> bool:
        return count <= self.rows and width <= self.width


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
        self.graphs: dict[tuple[int, int], Captured] = {}
        self._pool = None  # one for all graphs: nothing inside outlives a replay
        self._left: tuple[Captured, list[Sequence], list[int]] | None = None
        self.use_graphs = cuda_graphs and rope_PR is not None
        self.capture_seconds = 0.0
        self.rope_PR = rope_PR

    def run(self, step: Step) -> Tensor:
        """`step.decodes` passes; returns the results [3, K, B] (see Launched.packed_3KB)."""
        sequences, passes = step.sequences, step.decodes
        size = self.cache.shape.block_size
        # The last token of a response needs no place.
        ends = [min(s.length + passes - 1, s.limit) for s in sequences]
        width = -(-max(ends) // size)
        captured = self._captured(sequences, width)
        if captured is None:
            state = self._state(sequences, passes, len(sequences), width)
            longest = max(s.length for s in sequences)
            for index in range(passes):
                self._body(state, longest + index)
            return state.out_3KB
        if self._left == (captured, sequences, [s.length for s in sequences]):
            # Everything but the new blocks is where the last burst has left it.
            places = self._places(sequences, captured.rows, captured.width)
            captured.state.places_BM.copy_(to_device(places, self.device), non_blocking=True)
        else:
            captured.state.copy_from(
                self._state(sequences, passes, captured.rows, captured.width)
            )
        captured.state.pass_1.zero_()
        for _ in range(passes):
            captured.replay()
        self._left = captured, sequences, [s.length + passes for s in sequences]
        return captured.state.out_3KB[:, :passes, : len(sequences)].clone()

    def _places(self, sequences: list[Sequence], rows: int, width: int) -> np.ndarray:
        places_BM = np.full((rows, width + 1), DROPPED, dtype=np.int32)
        places_BM[:, -1] = 0
        size, limit = self.cache.shape.block_size, self.model.arch.max_positions
        for row, sequence in enumerate(sequences):
            blocks = sequence.table.blocks[:width]
            places_BM[row, : len(blocks)] = blocks
            places_BM[row, -1] = min(len(blocks) * size, limit)
        return places_BM

    def _state(
        self, sequences: list[Sequence], passes: int, rows: int, width: int
    ) -> DecodeState:
        """The sequences as the host knows them, in a state of so many rows and blocks."""
        padding, kwargs = rows - len(sequences), dict(device=self.device)
        positions = [s.length - 1 for s in sequences] + [0] * padding
        return DecodeState(
            token_B=self._tokens(sequences, padding), position_B=to_device(positions, self.device),
            places_BM=to_device(self._places(sequences, rows, width), self.device),
            sampling=SamplingBatch.of(sequences, self.model, padding=padding),
            out_3KB=torch.empty((3, passes, rows), dtype=torch.float64, **kwargs),
            pass_1=torch.zeros(1, dtype=torch.int64, **kwargs),
        )  # fmt: skip

    def _tokens(self, sequences: list[Sequence], padding: int) -> Tensor:
        """The pending tokens; those that the host does not know yet come from the device."""
        token_B = to_device([s.tokens[-1] for s in sequences] + [0] * padding, self.device)
        flying = [(row, *s.newest) for row, s in enumerate(sequences) if s.ahead]
        for packed_3KB in {id(packed): packed for _, packed, _ in flying}.values():
            pairs = [(row, column) for row, packed, column in flying if packed is packed_3KB]
            rows, columns = to_device(pairs, self.device).unbind(1)
            token_B[rows] = packed_3KB[0, -1, columns].long()
        return token_B

    def _body(self, state: DecodeState, max_context: int) -> None:
        """One pass; no value is read by the host."""
        table_BN, end_B = state.places_BM[:, :-1], state.places_BM[:, -1]
        live_B = state.position_B < end_B
        position_B = torch.where(live_B, state.position_B, 0)
        cache = PagedCache(
            keys=self.cache.keys, values=self.cache.values, block_table_BN=table_BN,
            context_B=torch.where(live_B, position_B + 1, 0).int(), max_context=max_context,
            rope_PR=self.rope_PR, decode=self.rope_PR is not None, routes=self.cache.routes,
        )  # fmt: skip
        batch = AttentionBatch(positions_T=position_B, lengths=[1] * len(position_B), cache=cache)
        if not cache.decode or cache.routes is not None:  # our kernels find the slots themselves
            size = self.cache.shape.block_size
            block_B = table_BN.gather(1, (position_B // size)[:, None])[:, 0].long()
            cache.slots_T = torch.where(live_B, block_B * size + position_B % size, -1)
        if not cache.decode:
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

    def _captured(self, sequences: list[Sequence], width: int) -> Captured | None:
        """The graph of the next larger size, captured on first use; None: run eagerly."""
        if not self.use_graphs or len(sequences) > GRAPH_SIZES[-1]:
            return None
        if any(s.sampling.top_k or s.sampling.top_p < 1 or s.held_back for s in sequences):
            return None
        if self._left and self._left[1] == sequences and self._left[0].fits(len(sequences), width):
            return self._left[0]
        rows = next(n for n in GRAPH_SIZES if n >= len(sequences))
        blocks = next(n for n in GRAPH_WIDTHS if n >= width)
        if (rows, blocks) not in self.graphs:
            self.graphs[rows, blocks] = self._capture(rows, blocks)
        return self.graphs[rows, blocks]

    def _capture(self, rows: int, width: int) -> Captured:
        begin = time.perf_counter()
        state = self._state([], self.burst, rows, width)
        longest = width * self.cache.shape.block_size
        if self.device.type != "cuda":
            replay = partial(self._body, state, longest)
            return Captured(replay=replay, state=state, rows=rows, width=width)
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
            rows, width, seconds, (torch.cuda.memory_reserved() - before) / 1e6,
        )  # fmt: skip
        return Captured(replay=graph.replay, state=state, rows=rows, width=width)
