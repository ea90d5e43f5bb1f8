"""Micro-batches: flat streams of whole sequences, ready for any model and schedule.

Sequences of one micro-batch stand one after the other in a stream of T tokens (no cross-talk: see
models/attention.py). A head computes only the N rows it is asked for, and every per-token quantity
that a loss needs travels beside them as `[N]`.

Shapes: B sequences, R longest response, T stream tokens, N head rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.models.attention import AttentionBatch
from megatron_rl.models.experts import FREE
from megatron_rl.models.gpt import ParallelModel

ROWS = ("all", "response", "values", "last")


@dataclass(kw_only=True)
class MicroBatch:
    """One forward (and backward) pass.

    Attributes:
        tokens_T: int64 `[T]`, padded with zeros at the end.
        attention: positions, sequence bounds and head rows.
        labels_N: int64 `[N]`, the token that row n predicts (-1 where there is none).
        sample_N, step_N: which sequence of the batch, and which response step, row n belongs to.
        fields: per-row tensors `[N]` of the loss.
        samples: indices of its sequences in the batch it was cut from; empty when inert.
        reference_NE: the reference model's final hidden states, for the KL of whole distributions
            (on the last stage; see `passes.attach_reference`).
    """

    tokens_T: Tensor
    attention: AttentionBatch
    labels_N: Tensor
    sample_N: Tensor
    step_N: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)
    samples: list[int] = field(default_factory=list)
    reference_NE: Tensor | None = None

    @property
    def inert(self) -> bool:
        return not self.samples

    def padded_to(self, length: int) -> MicroBatch:
        """The same micro-batch with its stream padded to `length` tokens."""
        missing = length - len(self.tokens_T)
        assert missing >= 0, f"can't pad {len(self.tokens_T)} tokens to {length}"
        if missing:
            self.tokens_T = pad(self.tokens_T, (0, missing))
            positions = self.attention.positions_T
            self.attention.positions_T = pad(positions, (0, missing))
            if self.attention.routes_LTK is not None:
                routes = pad(self.attention.routes_LTK, (0, 0, 0, missing), value=FREE)
                self.attention.routes_LTK = routes
        return self


def pack(
    sequences: Sequence[Tensor], prompt_lengths: Sequence[int], *, model: ParallelModel,
    rows: str = "all", samples: Sequence[int] | None = None,
    fields: dict[str, Tensor] | None = None, padded: bool = False,
    routes: Sequence[Tensor | None] = (),
) -> MicroBatch:  # fmt: skip
    """Packs whole sequences into one micro-batch on the model's device.

    Args:
        sequences: int64 `[length]` each, prompt then response.
        prompt_lengths: prompt tokens of each.
        rows: which stream positions the head computes: "all"; "response" (those that predict a
            response token); "values" (the same, and the state after the last token); "last" (the
            last token of each sequence).
        samples: index of each sequence in the caller's batch; default 0…B−1.
        fields: `[batch, R]` tensors, gathered at (sample, step) of every row.
        padded: fill every sequence with zeros to the longest; no row and no causal attention of a
            real token ever sees them.
        routes: int16 `[L, tokens, K]` of each sequence, the experts that its first tokens take.
    """
    assert rows in ROWS, f"rows must be one of {ROWS}, not {rows!r}"
    device = model.device
    lengths = [len(s) for s in sequences]
    samples = list(range(len(sequences))) if samples is None else list(samples)
    spans = [max(lengths)] * len(lengths) if padded else lengths
    starts = torch.tensor([0, *spans]).cumsum(0)
    tokens = torch.cat([pad(s, (0, n - len(s))) for s, n in zip(sequences, spans, strict=True)])
    positions = torch.cat([torch.arange(n) for n in spans])
    row_index, sample_index, step_index, labels = [], [], [], []
    for i, (length, prompt) in enumerate(zip(lengths, prompt_lengths, strict=True)):
        first = {"all": 0, "last": length - 1}.get(rows, prompt - 1)
        last = length - 1 if rows == "response" else length
        index = torch.arange(first, last)
        row_index.append(index + starts[i])
        sample_index.append(torch.full_like(index, samples[i]))
        step_index.append(index - first)
        following = torch.cat((sequences[i].cpu(), torch.tensor([-1])))
        labels.append(following[index + 1])
    sample_N, step_N = torch.cat(sample_index), torch.cat(step_index)
    multiple = model.groups.layout.tp if model.config.sequence_parallel else 1
    batch = MicroBatch(
        tokens_T=tokens.to(device), labels_N=torch.cat(labels).to(device),
        sample_N=sample_N.to(device), step_N=step_N.to(device), samples=samples,
        attention=AttentionBatch(
            positions_T=positions.to(device), lengths=spans,
            cu_seqlens_B1=starts.to(torch.int32).to(device),
            rows_N=None if rows == "all" else torch.cat(row_index).to(device),
            routes_LTK=_packed_routes(routes, spans, device),
        ),
        fields={k: v[sample_N, step_N].to(device) for k, v in (fields or {}).items()},
    )  # fmt: skip
    return batch.padded_to(-(-len(tokens) // multiple) * multiple)


def _packed_routes(
    routes: Sequence[Tensor | None], spans: list[int], device: torch.device
) -> Tensor | None:
    """Routes of sequences that take `spans` tokens of a stream each."""
    if not routes or any(r is None for r in routes):
        return None
    parts = [
        pad(r, (0, 0, 0, n - r.shape[1]), value=FREE) for r, n in zip(routes, spans, strict=True)
    ]
    return torch.cat(parts, dim=1).to(device)


def inert(model: ParallelModel, rows: str, fields: Mapping[str, Tensor]) -> MicroBatch:
    """A micro-batch that changes nothing: it takes part in every collective with zero weight.

    Args:
        rows, fields: as the real micro-batches have them; only names and types of the fields count.
    """
    zeros = {name: torch.zeros(1, 1, dtype=x.dtype) for name, x in fields.items()}
    batch = pack([torch.zeros(2, dtype=torch.int64)], [1], model=model, rows=rows, fields=zeros)
    batch.samples = []
    return batch


def fit_schedule(
    model: ParallelModel, batches: list[MicroBatch], count: int | None = None
) -> list[MicroBatch]:
    """Makes a list of micro-batches that Megatron's schedules can run.

    All data parallel ranks must pass the same `count` (see `common_count`): shorter lists are
    filled with inert micro-batches. The interleaved schedule wants at least PP of them and a
    remainder of 0 or at least PP. Under pipeline parallelism all streams get one length, because
    stages exchange tensors of a fixed shape.
    """
    layout = model.groups.layout
    count = len(batches) if count is None else count
    if layout.vpp > 1:
        count = -(-count // layout.pp) * layout.pp
    rows = "all" if batches[0].attention.rows_N is None else "response"
    batches = batches + [
        inert(model, rows, batches[0].fields) for _ in range(count - len(batches))
    ]
    if layout.pp > 1:
        longest = max(len(b.tokens_T) for b in batches)
        batches = [b.padded_to(longest) for b in batches]
    return batches


def balanced_split(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Splits indices into `parts` lists of similar total cost (largest first, to the lightest).

    Deterministic; each list is in ascending order. With fewer items than parts some are empty.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    totals, lists = [0.0] * parts, [[] for _ in range(parts)]
    for i in order:
        lightest = min(range(parts), key=lambda p: (totals[p], len(lists[p]), p))
        totals[lightest] += costs[i]
        lists[lightest].append(i)
    return [sorted(part) for part in lists]


def partition(
    lengths: Sequence[int], *, micro_batch_size: int | None, max_tokens: int | None,
    costs: Sequence[float] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Indices of the sequences of each micro-batch.

    Args:
        lengths: tokens of each sequence.
        micro_batch_size: sequences per micro-batch, in order; or
        max_tokens: token budget per micro-batch, balanced by cost.
        costs: of each sequence; default: its tokens.

    Raises:
        ValueError: if a sequence is longer than the budget.
    """
    if not lengths:
        return []
    if max_tokens is None:
        size = micro_batch_size or len(lengths)
        return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
    if max(lengths) > max_tokens:
        raise ValueError(
            f"training.max_tokens_per_micro_batch is {max_tokens}, but a sequence has "
            f"{max(lengths)} tokens: raise it to at least that, or shorten prompts and responses"
        )
    parts = -(-sum(lengths) // max_tokens)
    while True:
        lists = balanced_split(costs or lengths, parts)
        if all(sum(lengths[i] for i in part) <= max_tokens for part in lists):
            return [part for part in lists if part]
        parts += 1
