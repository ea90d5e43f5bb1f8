"""Runs scheduled steps through the model: cache, pipeline stages, logits, draws.

Megatron's pipeline schedules can't feed a token back, so generation drives the stages itself:
hidden states travel forward, sampled tokens come back. Nothing here waits for a token: `launch`
returns what will become the tokens, so that the next micro-batch can start.

Shapes: T new tokens of the step, B sequences, N blocks per sequence, K decode passes, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.generation.cache import KVCache
from megatron_rl.generation.decode import DecodeLoop
from megatron_rl.generation.sampler import SamplingBatch, draw, pack
from megatron_rl.generation.scheduler import Step
from megatron_rl.models.attention import AttentionBatch, PagedCache
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.models.inference_forward import stage_forward


@dataclass(kw_only=True, slots=True)
class Launched:
    """A step that is under way.

    Attributes:
        step: what was launched.
        packed_3KB: token ids, log-probs of the sampled and of the full distribution (fp64), filled
            once `work` is done and the device has got there.
    """

    step: Step
    packed_3KB: Tensor
    work: dist.Work | None = None
    sent: tuple[Tensor, dist.Work] | None = None  # keeps the message alive

    def take(self) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """Waits; tokens, log-probs and full log-probs `[K][B]`, equal on the replica's ranks."""
        if self.work is not None:
            self.work.wait()
        if self.sent is not None:
            self.sent[1].wait()
        tokens, kept, full = self.packed_3KB.cpu()
        return tokens.long().tolist(), kept.float().tolist(), full.float().tolist()


class Runner:
    """Turns steps into sampled tokens on this rank's stage."""

    def __init__(self, model: ParallelModel, cache: KVCache, *, cuda_graphs: bool) -> None:
        self.model, self.cache = model, cache
        self.decode_loop = None
        if model.groups.layout.pp == 1:
            self.decode_loop = DecodeLoop(model, cache, cuda_graphs=cuda_graphs)

    @torch.no_grad()
    def launch(self, step: Step) -> Launched:
        """One forward pass and one draw, or several of a decode step.

        All ranks of the replica must launch the same steps in the same order.
        """
        self.cache.copy(step.copies)
        if step.decodes and self.decode_loop is not None:
            return Launched(step=step, packed_3KB=self.decode_loop.run(step))
        tokens_T, batch = self._prepare(step)
        logits_BV, sent = self._forward(tokens_T, batch)
        return self._draw(step, logits_BV, sent)

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
            slots_T=torch.tensor(slots, device=device),
            block_table_BN=table_tensor(step, max(-(-c // size) for c in contexts), device),
            context_B=torch.tensor(contexts, dtype=torch.int32, device=device),
            max_context=max(contexts), fresh=contexts == step.new_tokens,
        )  # fmt: skip
        starts = torch.tensor([0, *step.new_tokens]).cumsum(0).to(torch.int32)
        rows = [ends[row] for _, row in step.draws]
        batch = AttentionBatch(
            positions_T=torch.tensor(positions, device=device), lengths=list(step.new_tokens),
            cu_seqlens_B1=starts.to(device), cache=cache,
            rows_N=torch.tensor(rows, dtype=torch.int64, device=device),
        )  # fmt: skip
        return torch.tensor(tokens, device=device), batch

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
            position_B = torch.tensor([len(s.tokens) for s in sequences], device=device)
            batch = SamplingBatch.of(sequences, self.model)
            sample = draw(logits_BV, position_B, batch, self.model)
            packed[:, 0] = pack(sample)
        work = None
        if groups.layout.pp > 1:
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
    return torch.tensor(rows, dtype=torch.int32, device=device)
