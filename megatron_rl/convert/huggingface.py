"""Hugging Face folders in and out of parallel models.

Reading touches only the slices that a rank needs; writing gathers one parameter at a time to
rank 0, which writes it before the next one comes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.convert.companions import companion_files
from megatron_rl.convert.hf_weights import HuggingFaceWeights
from megatron_rl.convert.hf_writer import ExportPlan
from megatron_rl.convert.load import load_weights
from megatron_rl.convert.model_folder import (
    OUTPUT_BIAS,
    OUTPUT_WEIGHT,
    TensorInfo,
    head_of,
    listing,
    stored_rules,
)
from megatron_rl.convert.names import Rule, all_rules, at_ep, whole_shape
from megatron_rl.convert.staging import carry_out
from megatron_rl.models.families import read_architecture
from megatron_rl.models.gpt import DTYPES, ParallelModel

# Beside a policy, a value head belongs to the critic that was trained with it.
_CRITIC_HEADS = ("v_head", "value_head")
_NO_HEAD = (
    "; a reward model needs a scalar head, as sequence classifiers with one label have: "
    "python -m megatron_rl.rewards.fit makes one"
)


class HuggingFaceFolder:
    """A folder with `config.json` and weights as transformers writes them; see `ModelFolder`.

    Args:
        role: decides the head; a critic made from a policy gets a fresh one.

    Raises:
        ValueError: for an unknown architecture or weights that can't be opened.
    """

    kind = "hf"
    note = ""

    def __init__(self, path: str | Path, role: str) -> None:
        self.path, self.role = Path(path), role
        self.companion_folder = self.path
        self.architecture = read_architecture(self.path)
        self.head = head_of(role)
        self.weights = HuggingFaceWeights(self.path)
        self._rules = stored_rules(self.architecture, self.head)
        names = self.weights.names()
        self.fresh_head = role == "critic" and "score.weight" not in names
        if self.head == "value" and "score.bias" not in names:
            self._rules.pop(OUTPUT_BIAS)
        if self.fresh_head:
            self._rules.pop(OUTPUT_WEIGHT)

    def check(self) -> None:
        """Compares names and shapes with what the architecture needs; see `ModelFolder`."""
        expected = self.huggingface_shapes()
        names = self.weights.names() - self.ignored()
        missing, extra = set(expected) - names, names - set(expected)
        if missing or extra:
            raise ValueError(
                f"{str(self.path)!r} does not hold the weights of a {self.architecture.family} "
                f"{self.role}: missing {listing(missing)}; unexpected {listing(extra)}"
                + (_NO_HEAD if "score.weight" in missing else "")
            )
        for name, shape in expected.items():
            found = tuple(self.weights(name).get_shape())
            if found != shape:
                head = name == "score.weight"
                why = "a value head has num_labels=1" if head else "so says its config.json"
                raise ValueError(
                    f"{name} in {str(self.path)!r} has the shape {found}, expected {shape}: {why}"
                )
        self._check_tied()

    def _check_tied(self) -> None:
        """Refuses a tied output layer beside weights of its own that say something else: which of
        the two transformers would use depends on its version."""
        names = self.weights.names()
        if self.head != "lm" or not self.architecture.tied or "lm_head.weight" not in names:
            return
        own, embedding = self.weights("lm_head.weight"), self.weights("model.embed_tokens.weight")
        rows, step = self.architecture.vocab, 8192
        equal = tuple(own.get_shape()) == tuple(embedding.get_shape()) and all(
            torch.equal(own[start : start + step], embedding[start : start + step])
            for start in range(0, rows, step)
        )
        if not equal:
            raise ValueError(
                f"config.json in {str(self.path)!r} says tie_word_embeddings, but lm_head.weight "
                "differs from model.embed_tokens.weight; set tie_word_embeddings to false to use "
                "both, or remove lm_head.weight"
            )

    def huggingface_shapes(self) -> dict[str, tuple[int, ...]]:
        """What the role reads, under Hugging Face names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in self._rules.values():
            shapes |= rule.shapes(self.architecture)
        return shapes

    def ignored(self) -> set[str]:
        """Tensors of the folder that are no part of the role: a tied or unused output layer, the
        critic's head beside a policy, and frequencies that follow from config.json."""
        found = {n for n in self.weights.names() if "rotary_emb.inv_freq" in n}
        if self.head == "value" or self.architecture.tied:
            found.add("lm_head.weight")
        if self.head == "lm":
            heads = {"score.weight", "score.bias"} & self.weights.names()
            found |= {n for n in heads if self.weights.stored_name(n).startswith(_CRITIC_HEADS)}
        return found & self.weights.names()

    def tensors(self) -> dict[str, TensorInfo]:
        """See `ModelFolder`; the parts of a fused tensor stand one after the other."""
        found = {}
        for name, rule in self._rules.items():
            shape = whole_shape(rule, self.architecture)
            found[name] = TensorInfo(shape=shape, dtype=self.weights.info(rule.hf[0]).dtype)
        return found

    def read_into(
        self, name: str, out: Tensor, *, tp: int = 1, rank: int = 0, ep: int = 1
    ) -> None:
        """See `ModelFolder`; reads only the slices that make up the part."""
        shard = at_ep(self._rules[name], ep).shard(self.weights, self.architecture, tp, rank)
        assert shard.shape == out.shape, (name, shard.shape, out.shape)
        out.copy_(shard)

    def source_files(self) -> list[Path]:
        """See `ModelFolder`."""
        return [self.path / "config.json", *self.weights.files]

    def companions(self) -> dict[str, Path]:
        """See `ModelFolder`."""
        return companion_files(self.companion_folder)

    def layout(self) -> dict[str, int]:
        """See `ModelFolder`."""
        return {}

    def details(self) -> dict[str, str]:
        """See `ModelFolder`."""
        shown = {"weight files": str(len(self.weights.files))}
        if ignored := self.ignored():
            shown["not part of the role"] = listing(ignored)
        return shown


def load_huggingface(
    model: ParallelModel, folder: str | Path, *, fresh_head: bool = False
) -> None:
    """Fills a model's parameters from a Hugging Face folder, in place.

    Args:
        fresh_head: a value head missing from the folder starts at zero (a critic made from a
            policy); otherwise a missing head is an error.
    """
    role = model.role if fresh_head or model.role != "critic" else "reward"
    opened = HuggingFaceFolder(folder, role)
    opened.check()
    load_weights(model, opened)


def gathered_tensors(
    model: ParallelModel, *, dtype: str | None = None,
    value: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach,
    only: str | None = None,
) -> Iterator[tuple[str, Tensor | None]]:  # fmt: skip
    """Yields every Hugging Face tensor in order; tensors on global rank 0, None elsewhere.

    All ranks of data parallel replica 0 take part; ranks of other replicas get nothing.

    Args:
        value: what to gather of each parameter: the weight, or its gradient in tests.
        only: a Megatron name: the one parameter to gather.
    """
    groups, arch = model.groups, model.arch
    if groups.dp_rank != 0:
        return
    mine = dict(model.named_parameters())
    seen: set[str] = set()
    for name, rule in all_rules(arch, head=model.head, ep=groups.layout.ep).items():
        if seen.issuperset(rule.hf) or (only or name) != name:
            continue
        seen.update(rule.hf)
        local = value(mine[name]) if name in mine else None
        merged = _merge_on_rank_0(name, rule, local, model)
        for hf_name in rule.hf:
            tensor = merged[hf_name] if merged else None
            yield hf_name, tensor.to(DTYPES[dtype]) if tensor is not None and dtype else tensor


def _merge_on_rank_0(
    name: str, rule: Rule, local: Tensor | None, model: ParallelModel
) -> dict[str, Tensor] | None:
    groups = model.groups
    owner = _owning_stage(name, model)
    shards: list[Tensor] | None = None
    if local is not None and groups.pp_rank == owner:
        local = local.contiguous()
        shards = [torch.empty_like(local) for _ in range(groups.layout.tp)]
        dist.all_gather(shards, local, group=groups.tp)
        shards = [shard.cpu() for shard in shards]
    if groups.tp_rank != 0:
        return None
    if owner != 0:
        payload = [shards]
        dist.broadcast_object_list(payload, src=groups.stage_rank(owner), group=groups.pp)
        shards = payload[0]
    return rule.merge(shards, model.arch) if groups.pp_rank == 0 else None


def _owning_stage(name: str, model: ParallelModel) -> int:
    """The pipeline stage whose copy of a parameter is exported."""
    layout = model.groups.layout
    if name.startswith("embedding."):
        return 0
    if not name.startswith("decoder.layers."):
        return layout.pp - 1
    per_chunk = model.arch.layers // (layout.pp * layout.vpp)
    return int(name.split(".")[2]) // per_chunk % layout.pp


def export_huggingface(
    model: ParallelModel, folder: str | Path, *, companions: dict[str, Path], dtype: str,
    max_shard_bytes: int = 5 * 2**30,
) -> None:  # fmt: skip
    """Writes a Hugging Face folder that transformers loads strictly.

    Collective over replica 0. The folder appears complete or not at all: it is written beside its
    place and renamed.

    Args:
        companions: files that travel with the model (`companion_files`); its config.json is the
            base of the new one.
    """
    names = stored_rules(model.arch, model.head)
    if model.head == "value":
        bias = dict(gathered_tensors(model, only=OUTPUT_BIAS)).get("score.bias")
        if bias is None or not bool(bias.any()):
            names.pop(OUTPUT_BIAS)  # see ExportPlan: a classifier without a bias
    tensors = gathered_tensors(model, dtype=dtype)
    if dist.get_rank() == 0:
        shapes = {n: s for rule in names.values() for n, s in rule.shapes(model.arch).items()}
        plan = ExportPlan(
            {n: TensorInfo(shape=s, dtype=DTYPES[dtype]) for n, s in shapes.items()},
            lambda name: _expect(name, next(tensors)), architecture=model.arch, role=model.role,
            companions=companions, max_bytes=max_shard_bytes,
        )  # fmt: skip
        fresh = {"export": uuid.uuid4().hex}  # never goes on with an earlier one
        carry_out(plan, Path(folder), identity=fresh, label="exporting", overwrite=True)
    for _ in tensors:
        pass  # on other ranks this is their whole part; on rank 0 a bias may be left


def _expect(name: str, found: tuple[str, Tensor | None]) -> Tensor:
    assert found[0] == name and found[1] is not None, (name, found[0])
    return found[1]
