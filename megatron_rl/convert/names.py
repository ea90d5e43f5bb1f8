"""One table between Hugging Face and Megatron names, used in both directions.

Each rule says how one Megatron parameter of a TP rank is cut from Hugging Face tensors (`shard`)
and how the ranks' parameters make up those tensors again (`merge`). Padding (whole groups of zero
heads, zero vocabulary rows) appears in `shard` and disappears in `merge`.

Layouts: `linear_qkv` holds, per KV group, its query heads, then its key, then its value rows;
`linear_fc1` on rank r holds [gate_r; up_r]. The experts of a layer are one parameter for the first
and one for the second product; a tensor parallel group of tp ranks holds each expert once: `ep`
parts of whole experts, each cut over tp/ep ranks (see models/experts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.models.architecture import Architecture


class Sliceable(Protocol):
    """A tensor in a file: `x[a:b]` and `x[:, a:b]` read only that part."""

    def __getitem__(self, index) -> Tensor: ...
    def get_shape(self) -> list[int]: ...


Source = Callable[[str], Sliceable]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated:
    """The same tensor on every TP rank (norms, value heads)."""

    hf: tuple[str, ...]
    shape: tuple[int, ...]

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        return {self.hf[0]: self.shape}

    def shard(self, source: Source, arch: Architecture, tp: int, rank: int) -> Tensor:
        return source(self.hf[0])[:]

    def merge(self, shards: list[Tensor], arch: Architecture) -> dict[str, Tensor]:
        return {self.hf[0]: shards[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Rows of the vocabulary, padded with zero rows to a multiple of tp."""

    hf: tuple[str, ...]

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        return {self.hf[0]: (arch.vocab, arch.hidden)}

    def shard(self, source: Source, arch: Architecture, tp: int, rank: int) -> Tensor:
        rows = arch.padded_vocab(tp) // tp
        start, stop = rank * rows, min((rank + 1) * rows, arch.vocab)
        return _pad(source(self.hf[0])[start:stop], 0, rows)

    def merge(self, shards: list[Tensor], arch: Architecture) -> dict[str, Tensor]:
        return {self.hf[0]: torch.cat(shards)[: arch.vocab]}


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryKeyValue:
    """`linear_qkv` weight or bias from the three projections."""

    hf: tuple[str, ...]

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        rows = (arch.heads, arch.kv_heads, arch.kv_heads)
        bias = self.hf[0].endswith("bias")
        return {
            name: (n * arch.head_dim,) if bias else (n * arch.head_dim, arch.hidden)
            for name, n in zip(self.hf, rows, strict=True)
        }

    def shard(self, source: Source, arch: Architecture, tp: int, rank: int) -> Tensor:
        d, per_group = arch.head_dim, arch.heads_per_group
        group_rows = (per_group + 2) * d
        rows = arch.padded_kv_heads(tp) * group_rows // tp
        first, last = rank * rows // group_rows, -(-(rank + 1) * rows // group_rows)
        real_last = min(last, arch.kv_heads)
        q, k, v = (source(name) for name in self.hf)
        pieces = []
        if first < real_last:
            q_rows = q[first * per_group * d : real_last * per_group * d]
            parts = (
                q_rows.unflatten(0, (real_last - first, per_group * d)),
                k[first * d : real_last * d].unflatten(0, (real_last - first, d)),
                v[first * d : real_last * d].unflatten(0, (real_last - first, d)),
            )
            pieces.append(torch.cat(parts, dim=1).flatten(0, 1))
        if len(pieces) == 0:
            sample = k[:0]
            pieces.append(sample.new_zeros((0, *sample.shape[1:])))
        whole = _pad(pieces[0], 0, (last - first) * group_rows)
        offset = rank * rows - first * group_rows
        return whole[offset : offset + rows]

    def merge(self, shards: list[Tensor], arch: Architecture) -> dict[str, Tensor]:
        d, per_group = arch.head_dim, arch.heads_per_group
        groups = torch.cat(shards).unflatten(0, (-1, (per_group + 2) * d))[: arch.kv_heads]
        q, k, v = groups.split([per_group * d, d, d], dim=1)
        return {
            name: x.flatten(0, 1).contiguous()
            for name, x in zip(self.hf, (q, k, v), strict=True)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Cut along the input dimension: the attention output (heads padded) and the MLP output."""

    hf: tuple[str, ...]
    heads: bool

    def _width(self, arch: Architecture, tp: int) -> int:
        return arch.padded_heads(tp) * arch.head_dim if self.heads else arch.ffn

    def _real(self, arch: Architecture) -> int:
        return arch.heads * arch.head_dim if self.heads else arch.ffn

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        return {self.hf[0]: (arch.hidden, self._real(arch))}

    def shard(self, source: Source, arch: Architecture, tp: int, rank: int) -> Tensor:
        width = self._width(arch, tp) // tp
        start = min(rank * width, self._real(arch))
        stop = min((rank + 1) * width, self._real(arch))
        return _pad(source(self.hf[0])[:, start:stop], 1, width)

    def merge(self, shards: list[Tensor], arch: Architecture) -> dict[str, Tensor]:
        return {self.hf[0]: torch.cat(shards, dim=1)[:, : self._real(arch)].contiguous()}


@dataclass(frozen=True, kw_only=True, slots=True)
class GateUp:
    """`linear_fc1` from the gate and up projections."""

    hf: tuple[str, ...]

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        return {name: (arch.ffn, arch.hidden) for name in self.hf}

    def shard(self, source: Source, arch: Architecture, tp: int, rank: int) -> Tensor:
        rows = arch.ffn // tp
        return torch.cat([source(name)[rank * rows : (rank + 1) * rows] for name in self.hf])

    def merge(self, shards: list[Tensor], arch: Architecture) -> dict[str, Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return {
            name: torch.cat([half[i] for half in halves]) for i, name in enumerate(self.hf)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfExperts:
    """A parameter that holds a matrix of every expert of the rank, one below the other.

    `hf` names the tensors of expert 0, then those of expert 1, …
    """

    hf: tuple[str, ...]
    ep: int = 1

    def experts_of(self, arch: Architecture, tp: int, rank: int) -> tuple[range, int, int]:
        """The whole experts of a rank, and its slice of each: how many rows, from which on."""
        part, slice_ = divmod(rank, tp // self.ep)
        count, rows = arch.experts.count // self.ep, arch.ffn // (tp // self.ep)
        return range(part * count, (part + 1) * count), rows, slice_ * rows

    def _by_part(self, shards: list[Tensor], arch: Architecture) -> list[Tensor]:
        """Shards `[experts, …]` of each expert parallel part, joined along the feed-forward size,
        which is their last axis but one."""
        slices = len(shards) // self.ep
        shaped = [s.unflatten(0, (arch.experts.count // self.ep, *self._inner, -1)) for s in shards]
        return [torch.cat(shaped[i : i + slices], dim=-2) for i in range(0, len(shards), slices)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGateUp(_OfExperts):
    """`[gate; up]` of each expert: `[experts · 2 · ffn, hidden]`."""

    _inner = (2,)

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        return {name: (arch.ffn, arch.hidden) for name in self.hf}

    def shard(self, source: Source, arch: Architecture, tp: int, rank: int) -> Tensor:
        experts, rows, start = self.experts_of(arch, tp, rank)
        names = self.hf[2 * experts.start : 2 * experts.stop]
        return torch.cat([source(name)[start : start + rows] for name in names])

    def merge(self, shards: list[Tensor], arch: Architecture) -> dict[str, Tensor]:
        whole = torch.cat(self._by_part(shards, arch)).flatten(0, 1)
        return dict(zip(self.hf, whole.unbind(), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertDown(_OfExperts):
    """The second matrix of each expert, transposed: `[experts · ffn, hidden]`."""

    _inner = ()

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        return {name: (arch.hidden, arch.ffn) for name in self.hf}

    def shard(self, source: Source, arch: Architecture, tp: int, rank: int) -> Tensor:
        experts, rows, start = self.experts_of(arch, tp, rank)
        names = self.hf[experts.start : experts.stop]
        return torch.cat([source(name)[:, start : start + rows].t() for name in names])

    def merge(self, shards: list[Tensor], arch: Architecture) -> dict[str, Tensor]:
        whole = torch.cat(self._by_part(shards, arch))
        return {
            name: x.t().contiguous() for name, x in zip(self.hf, whole.unbind(), strict=True)
        }


Rule = Replicated | Vocabulary | QueryKeyValue | Columns | GateUp | ExpertGateUp | ExpertDown


def at_ep(rule: Rule, ep: int) -> Rule:
    """The rule where experts are spread over `ep` parts of a tensor parallel group."""
    return replace(rule, ep=ep) if isinstance(rule, _OfExperts) else rule


def whole_shape(rule: Rule, arch: Architecture) -> tuple[int, ...]:
    """Shape of the whole Megatron parameter without padding: the parts below one another."""
    shapes = list(rule.shapes(arch).values())
    if isinstance(rule, ExpertDown):
        shapes = [(columns, rows) for rows, columns in shapes]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def layer_rules(arch: Architecture, layer: int) -> dict[str, Rule]:
    """Rules of one transformer layer, keyed by Megatron name (global layer number)."""
    hf, mg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    qkv = [f"{hf}self_attn.{p}_proj." for p in "qkv"]

    def norm(name: str, size: int = arch.hidden) -> Replicated:
        return Replicated(hf=(f"{hf}{name}.weight",), shape=(size,))

    rules: dict[str, Rule] = {
        f"{mg}input_layernorm.weight": norm("input_layernorm"),
        f"{mg}self_attention.linear_qkv.weight": QueryKeyValue(
            hf=tuple(p + "weight" for p in qkv)
        ),
        f"{mg}self_attention.linear_proj.weight": Columns(
            hf=(f"{hf}self_attn.o_proj.weight",), heads=True
        ),
        f"{mg}pre_mlp_layernorm.weight": norm("post_attention_layernorm"),
    }
    if arch.experts is not None:
        rules |= _expert_rules(arch, hf, mg)
    else:
        rules[f"{mg}mlp.linear_fc1.weight"] = GateUp(
            hf=(f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
        )
        rules[f"{mg}mlp.linear_fc2.weight"] = Columns(
            hf=(f"{hf}mlp.down_proj.weight",), heads=False
        )
    if arch.qkv_bias:
        rules[f"{mg}self_attention.linear_qkv.bias"] = QueryKeyValue(
            hf=tuple(p + "bias" for p in qkv)
        )
    if arch.qk_norm:
        for mine, theirs in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            rules[f"{mg}self_attention.{mine}.weight"] = norm(f"self_attn.{theirs}", arch.head_dim)
    return rules


def _expert_rules(arch: Architecture, hf: str, mg: str) -> dict[str, Rule]:
    """Router and experts of the layer with these prefixes."""
    block, gate, up, down = {
        "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
        "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    }[arch.family]

    def names(*parts: str) -> tuple[str, ...]:
        return tuple(
            f"{hf}{block}.experts.{expert}.{part}.weight"
            for expert in range(arch.experts.count)
            for part in parts
        )

    return {
        f"{mg}mlp.router.weight": Replicated(
            hf=(f"{hf}{block}.gate.weight",), shape=(arch.experts.count, arch.hidden)
        ),
        f"{mg}mlp.experts.gate_up": ExpertGateUp(hf=names(gate, up)),
        f"{mg}mlp.experts.down": ExpertDown(hf=names(down)),
    }


def all_rules(arch: Architecture, *, head: str, ep: int = 1) -> dict[str, Rule]:
    """Every parameter of a model: Megatron name → rule, in file order.

    Args:
        ep: parts of a tensor parallel group that experts are spread over.
        head: "lm" (tied: the output layer reads the embedding) or "value" (`score.weight`, the
            name of transformers' sequence classifiers; no bias there).
    """
    embedding = "model.embed_tokens.weight"
    rules: dict[str, Rule] = {"embedding.word_embeddings.weight": Vocabulary(hf=(embedding,))}
    for layer in range(arch.layers):
        rules |= layer_rules(arch, layer)
    rules["decoder.final_layernorm.weight"] = Replicated(
        hf=("model.norm.weight",), shape=(arch.hidden,)
    )
    if head == "lm":
        output = embedding if arch.tied else "lm_head.weight"
        rules["output_layer.weight"] = Vocabulary(hf=(output,))
    else:
        rules["output_layer.weight"] = Replicated(hf=("score.weight",), shape=(1, arch.hidden))
        rules["output_layer.bias"] = Replicated(hf=("score.bias",), shape=(1,))
    return {name: at_ep(rule, ep) for name, rule in rules.items()}


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros appended along `dim` up to `size`."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim=dim)
