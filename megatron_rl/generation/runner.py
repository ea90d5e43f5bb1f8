"""Runs one scheduled step through the model: cache, pipeline stages, logits.

Megatron's pipeline schedules can't feed a token back, so generation drives the stages itself:
hidden states travel forward, sampled tokens come back.

Shapes: T new tokens of the step, B sequences, N blocks per sequence, G KV heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.generation.sampler import draw
from megatron_rl.generation.scheduler import Step
from megatron_rl.models.attention import AttentionBatch, PagedCache
from megatron_rl.models.gpt import ParallelModel


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Size of the KV cache on one rank."""

    blocks: int
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_block(self) -> int:
        """Keys and values of all local layers, in bytes."""
        numbers = 2 * self.layers * self.block_size * self.kv_heads * self.head_dim
        return numbers * self.dtype.itemsize


def cache_shape(model: ParallelModel, *, blocks: int, block_size: int) -> CacheShape:
    """The cache that `model`'s local layers need."""
    layers = sum(len(chunk.decoder.layers) for chunk in model.chunks)
    kv_heads = max(model.config.num_query_groups // model.groups.layout.tp, 1)
    return CacheShape(
        blocks=blocks, block_size=block_size, layers=layers, kv_heads=kv_heads,
        head_dim=model.arch.head_dim, dtype=model.config.params_dtype,
    )  # fmt: skip


class Runner:
    """Owns the KV cache and turns steps into sampled tokens."""

    def __init__(self, model: ParallelModel, shape: CacheShape) -> None:
        self.model, self.shape = model, shape
        size = (shape.blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        allocate = [
            torch.zeros(size, dtype=shape.dtype, device=model.device)
            for _ in range(2 * shape.layers)
        ]
        self.keys, self.values = allocate[: shape.layers], allocate[shape.layers :]

    @torch.no_grad()
    def run(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """One forward pass and one draw.

        Returns:
            For the sequences whose last pending token was computed, in order: token ids (int64),
            log-probs of the sampled distribution and of the full one (fp32), on the CPU and equal
            on all ranks of the replica.
        """
        completes = [
            s.pending == n for s, n in zip(step.sequences, step.new_tokens, strict=True)
        ]
        tokens_T, batch = self._prepare(step, completes)
        logits = self._forward(tokens_T, batch)
        drawn = [s for s, done in zip(step.sequences, completes, strict=True) if done]
        return self._draw(logits, drawn)

    def _prepare(self, step: Step, completes: list[bool]) -> tuple[Tensor, AttentionBatch]:
        size, device = self.shape.block_size, self.model.device
        tokens, positions, slots, rows, start = [], [], [], [], 0
        for sequence, new, done in zip(step.sequences, step.new_tokens, completes, strict=True):
            span = range(sequence.computed, sequence.computed + new)
            tokens += sequence.tokens[span.start : span.stop]
            positions += span
            slots += [sequence.table.blocks[p // size] * size + p % size for p in span]
            start += new
            rows += [start - 1] if done else []
        contexts = [s.computed + n for s, n in zip(step.sequences, step.new_tokens, strict=True)]
        widest = max(-(-c // size) for c in contexts)
        table = [
            s.table.blocks[:widest] + [0] * (widest - len(s.table.blocks)) for s in step.sequences
        ]
        cache = PagedCache(
            keys=self.keys, values=self.values, slots_T=torch.tensor(slots, device=device),
            block_table_BN=torch.tensor(table, dtype=torch.int32, device=device),
            context_B=torch.tensor(contexts, dtype=torch.int32, device=device),
            max_context=max(contexts),
        )  # fmt: skip
        starts = torch.tensor([0, *step.new_tokens]).cumsum(0).to(torch.int32)
        batch = AttentionBatch(
            positions_T=torch.tensor(positions, device=device), lengths=list(step.new_tokens),
            cu_seqlens_B1=starts.to(device), cache=cache,
            rows_N=torch.tensor(rows, dtype=torch.int64, device=device),
        )  # fmt: skip
        return torch.tensor(tokens, device=device), batch

    def _forward(self, tokens_T: Tensor, batch: AttentionBatch) -> Tensor | None:
        """Drives the (virtual) stages in order; logits on the last stage, None elsewhere."""
        groups, config = self.model.groups, self.model.config
        layout, output = groups.layout, None
        for chunk in self.model.chunks:
            if not chunk.pre_process:
                hidden = torch.empty(
                    (len(tokens_T), 1, config.hidden_size), dtype=config.params_dtype,
                    device=tokens_T.device,
                )  # fmt: skip
                previous = groups.stage_rank((groups.pp_rank - 1) % layout.pp)
                dist.recv(hidden, previous, groups.pp)
                chunk.set_input_tensor(hidden)
            output = chunk(
                input_ids=tokens_T[None], position_ids=None, attention_mask=None,
                packed_seq_params=batch,
            )  # fmt: skip
            if not chunk.post_process:
                following = groups.stage_rank((groups.pp_rank + 1) % layout.pp)
                dist.send(output.contiguous(), following, groups.pp)
                output = None
        return output

    def _draw(self, logits: Tensor | None, sequences: list) -> tuple[Tensor, Tensor, Tensor]:
        groups, count = self.model.groups, len(sequences)
        if count == 0:
            return torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0)
        if logits is not None:
            sample = draw(logits, sequences, self.model)
            packed = torch.stack(
                (sample.token_T.double(), sample.kept_logprob_T, sample.logprob_T)
            )
        else:
            packed = torch.empty((3, count), dtype=torch.float64, device=self.model.device)
        if groups.layout.pp > 1:
            dist.broadcast(packed, groups.stage_rank(groups.layout.pp - 1), groups.pp)
        packed = packed.cpu()
        return packed[0].long(), packed[1].float(), packed[2].float()
