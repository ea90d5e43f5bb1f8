"""Runs scheduled steps through the model: cache, pipeline stages, logits, draws.

Megatron's pipeline schedules can't feed a token back, so generation drives the stages itself:
hidden states travel forward, sampled tokens come back. Nothing here waits for a token: `launch`
returns what will become the tokens, so that the next micro-batch can start.

Shapes: T new tokens of the step, B sequences, N blocks per sequence, K decode passes, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.generation.cache import KVCache
from megatron_rl.generation.decode import DecodeLoop
from megatron_rl.generation.sampler import SamplingBatch, draw, pack
from megatron_rl.generation.scheduler import Step
from megatron_rl.generation.sequence import Sequence
from megatron_rl.generation.transfer import ToHost, to_device
from megatron_rl.kernels.rope_kv_write import rope_table
from megatron_rl.models.attention import AttentionBatch, PagedCache, inverse_frequencies
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.models.inference_forward import stage_forward


@dataclass(kw_only=True, slots=True)
class Launched:
    """A step that is under way.

    Attributes:
        step: what was launched.
        packed_3KB: token ids, log-probs of the sampled and of the full distribution (fp64), filled
            once `work` is done and the device has got there.
        copy: of it, on its way to the host; None where `work` comes first.
    """

    step: Step
    packed_3KB: Tensor
    copy: ToHost | None = None
    work: dist.Work | None = None
    sent: tuple[Tensor, dist.Work] | None = None  # keeps the message alive

    def take(self) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """Waits; tokens, log-probs and full log-probs `[B][K]`, equal on the replica's ranks."""
        if self.work is not None:
            self.work.wait()
        if self.sent is not None:
            self.sent[1].wait()
        packed_3KB = (self.copy or ToHost(self.packed_3KB)).wait()
        tokens, kept, full = packed_3KB.transpose(1, 2)
        return tokens.long().tolist(), kept.float().tolist(), full.float().tolist()


class Runner:
    """Turns steps into sampled tokens on this rank's stage."""

    def __init__(
        self, model: ParallelModel, cache: KVCache, *, burst: int, cuda_graphs: bool
    ) -> None:
        self.model, self.cache = model, cache
        self.rope_PR, self.decode_loop = None, None
        if cache.kernels_fit(cache.keys[0]):
            frequencies = inverse_frequencies(model.arch.head_dim, model.arch.rope)
            self.rope_PR = rope_table(frequencies.to(model.device), model.arch.max_positions)
        if model.groups.layout.pp == 1:
            self.decode_loop = DecodeLoop(
                model, cache, rope_PR=self.rope_PR, burst=burst, cuda_graphs=cuda_graphs
            )

    @torch.no_grad()
    def launch(self, step: Step) -> Launched:
        """One forward pass and one draw, or several of a decode step.

        All ranks of the replica must launch the same steps in the same order.
        """
        self.cache.copy(step.copies)
        if step.decodes and self.decode_loop is not None:
            packed_3KB = self.decode_loop.run(step)
            launched = Launched(step=step, packed_3KB=packed_3KB, copy=ToHost(packed_3KB))
        else:
            tokens_T, batch = self._prepare(step)
            logits_BV, sent = self._forward(tokens_T, batch)
            launched = self._draw(step, logits_BV, sent)
        for column, (sequence, _) in enumerate(step.draws):
            sequence.newest = launched.packed_3KB, column
        return launched

    def routes_of(self, sequence: Sequence) -> ToHost:
        """The experts that the computed tokens of a sequence took in this rank's layers."""
        size, blocks = self.cache.shape.block_size, sequence.table.blocks
        places = [(blocks[p // size], p % size) for p in range(len(sequence.tokens) - 1)]
        slots = [-1 if block < 0 else block * size + offset for block, offset in places]
        return ToHost(self.cache.routes_of(slots))

    def _prepare(self, step: Step) -> tuple[Tensor, AttentionBatch]:
        size, device = self.cache.shape.block_size, self.model.device
        tokens, positions, slots, ends = [], [], [], []
        for sequence, new in zip(step.sequences, step.new_tokens, strict=True):
            span = range(sequence.computed, sequence.computed + new)
            tokens += sequence.tokens[span.start : span.stop]
            positions += span
            slots += [sequence.table.blocks[p // size] * size + p % size for p in span]
            ends.append(len(tokens) - 1)
        contexts = [s.computed + n for s, n in zip(step.sequences, step.new_tokens, strict=True)]
        cache = PagedCache(
            keys=self.cache.keys, values=self.cache.values,
            slots_T=to_device(slots, device),
            block_table_BN=table_tensor(step, max(-(-c // size) for c in contexts), device),
            context_B=to_device(contexts, device, torch.int32),
            max_context=max(contexts), fresh=contexts == step.new_tokens, rope_PR=self.rope_PR,
            routes=self.cache.routes,
            decode=self.rope_PR is not None and step.decodes > 0,
        )  # fmt: skip
        starts = [0, *accumulate(step.new_tokens)]
        rows = [ends[row] for _, row in step.draws]
        batch = AttentionBatch(
            positions_T=to_device(positions, device), lengths=list(step.new_tokens),
            cu_seqlens_B1=to_device(starts, device, torch.int32), cache=cache,
            rows_N=to_device(rows, device, torch.int64),
        )  # fmt: skip
        return to_device(tokens, device), batch

    def _forward(
        self, tokens_T: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor | None, tuple[Tensor, dist.Work] | None]:
        """Drives this rank's (virtual) stages in order; logits on the last one, None elsewhere."""
        groups, config = self.model.groups, self.model.config
        pp, output, sent = groups.layout.pp, None, None
        for chunk in self.model.chunks:
            hidden_TE = None
            if not chunk.pre_process:
                hidden_TE = torch.empty(
                    (len(tokens_T), config.hidden_size), dtype=config.params_dtype,
                    device=tokens_T.device,
                )  # fmt: skip
                dist.recv(hidden_TE, groups.stage_rank((groups.pp_rank - 1) % pp), groups.pp)
            output = stage_forward(chunk, tokens_T, hidden_TE, batch)
            if not chunk.post_process:
                if sent is not None:
                    sent[1].wait()
                output = output.contiguous()
                following = groups.stage_rank((groups.pp_rank + 1) % pp)
                sent = output, dist.isend(output, following, groups.pp)
                output = None
        return output, sent

    def _draw(
        self, step: Step, logits_BV: Tensor | None, sent: tuple[Tensor, dist.Work] | None
    ) -> Launched:
        """The draw on the last stage, and its way to the others."""
        groups, device = self.model.groups, self.model.device
        sequences = [s for s, _ in step.draws]
        packed = torch.empty((3, 1, len(sequences)), dtype=torch.float64, device=device)
        if not sequences:
            return Launched(step=step, packed_3KB=packed, sent=sent)
        if logits_BV is not None:
            position_B = to_device([len(s.tokens) for s in sequences], device)
            batch = SamplingBatch.of(sequences, self.model)
            sample = draw(logits_BV, position_B, batch, self.model)
            packed[:, 0] = pack(sample)
        if groups.layout.pp == 1:
            return Launched(step=step, packed_3KB=packed, copy=ToHost(packed), sent=sent)
        last = groups.stage_rank(groups.layout.pp - 1)
        work = dist.broadcast(packed, last, groups.pp, async_op=True)
        return Launched(step=step, packed_3KB=packed, work=work, sent=sent)


def table_tensor(step: Step, width: int, device: torch.device) -> Tensor:
    """Block tables int32 `[B, width]`; what is dropped or not there yet is 0 and never attended."""
    rows = [
        [max(block, 0) for block in s.table.blocks[:width]]
        + [0] * (width - len(s.table.blocks))
        for s in step.sequences
    ]
    return to_device(rows, device, torch.int32)
