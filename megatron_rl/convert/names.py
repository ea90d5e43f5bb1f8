"""One table between Hugging Face and Megatron names, used in both directions.

Each rule says how one Megatron parameter of a TP rank is cut from Hugging Face tensors (`shard`)
and how the ranks' parameters make up those tensors again (`merge`). Padding (whole groups of zero
heads, zero vocabulary rows) appears in `shard` and disappears in `merge`.

Layouts: `linear_qkv` holds, per KV group, its query heads, then its key, then its value rows;
`linear_fc1` on rank r holds [gate_r; up_r].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.models.families import Architecture


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


Rule = Replicated | Vocabulary | QueryKeyValue | Columns | GateUp


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
        f"{mg}mlp.linear_fc1.weight": GateUp(
            hf=(f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
        ),
        f"{mg}mlp.linear_fc2.weight": Columns(hf=(f"{hf}mlp.down_proj.weight",), heads=False),
    }
    if arch.qkv_bias:
        rules[f"{mg}self_attention.linear_qkv.bias"] = QueryKeyValue(
            hf=tuple(p + "bias" for p in qkv)
        )
    if arch.qk_norm:
        for mine, theirs in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            rules[f"{mg}self_attention.{mine}.weight"] = norm(f"self_attn.{theirs}", arch.head_dim)
    return rules


def all_rules(arch: Architecture, *, head: str) -> dict[str, Rule]:
    """Every parameter of a model: Megatron name → rule, in file order.

    Args:
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
    return rules


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros appended along `dim` up to `size`."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim=dim)
