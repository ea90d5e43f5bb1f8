"""Hugging Face folders in and out of parallel models.

Reading touches only the slices that a rank needs; writing gathers one parameter at a time to
rank 0, which keeps one file's worth of tensors in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.convert.names import Rule, Sliceable, all_rules
from megatron_rl.models.families import config_json
from megatron_rl.models.gpt import DTYPES, ParallelModel

_COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json",
    "chat_template*", "generation_config.json",
)  # fmt: skip


class HuggingFaceWeights:
    """The tensors of a model folder, read lazily by name.

    Raises:
        ValueError: for a folder without safetensors, an index naming a missing shard, or a file
            that is cut short.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            self._file_of = json.loads(index.read_text())["weight_map"]
            missing = sorted({f for f in self._file_of.values() if not self._path(f).is_file()})
            if missing:
                raise ValueError(f"{index} names files that are missing: {', '.join(missing)}")
        else:
            files = sorted(self.folder.glob("*.safetensors"))
            if not files:
                raise ValueError(
                    f"no *.safetensors in {str(self.folder)!r}: weights are read from safetensors "
                    "only; save the model with transformers' save_pretrained first"
                )
            self._file_of = {k: f.name for f in files for k in self._open(f.name).keys()}
        self._handles: dict[str, object] = {}

    def _path(self, file: str) -> Path:
        return self.folder / file

    def _open(self, file: str):
        try:
            return safe_open(str(self._path(file)), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{self._path(file)} can't be read ({error}): it is damaged or cut short; "
                "fetch it again"
            ) from error

    def names(self) -> set[str]:
        return set(self._file_of)

    def __call__(self, name: str) -> Sliceable:
        """The tensor `name`, still in its file.

        Raises:
            ValueError: if no file holds it.
        """
        if name not in self._file_of:
            raise ValueError(f"{str(self.folder)!r} has no tensor {name!r}, which the model needs")
        file = self._file_of[name]
        if file not in self._handles:
            self._handles[file] = self._open(file)
        return self._handles[file].get_slice(name)


def check_weights(weights: HuggingFaceWeights, model: ParallelModel, *, fresh_head: bool) -> None:
    """Compares names and shapes with what the architecture needs, before anything is loaded.

    Raises:
        ValueError: listing missing and unexpected tensors, or the first wrong shape.
    """
    rules = all_rules(model.arch, head=model.head)
    expected = {
        name: shape for rule in rules.values() for name, shape in rule.shapes(model.arch).items()
    }
    names = weights.names()
    optional = {"score.weight", "score.bias"} if fresh_head else {"score.bias"}
    ignored = {"lm_head.weight"} if model.head == "value" or model.arch.tied else set()
    missing = sorted(set(expected) - names - optional)
    extra = sorted(n for n in names - set(expected) - ignored if "rotary_emb.inv_freq" not in n)
    if missing or extra:
        raise ValueError(
            f"{str(weights.folder)!r} does not hold the weights of a {model.arch.family} "
            f"{model.role}: missing {missing[:8] or 'none'}, unexpected {extra[:8] or 'none'}"
        )
    for name, shape in expected.items():
        if shape is not None and name in names:
            found = tuple(weights(name).get_shape())
            if found != shape:
                raise ValueError(f"{name} in {str(weights.folder)!r}: {found}, expected {shape}")


def load_huggingface(
    model: ParallelModel, folder: str | Path, *, fresh_head: bool = False
) -> None:
    """Fills a model's parameters from a Hugging Face folder, in place.

    Args:
        fresh_head: a value head missing from the folder starts at zero (a critic made from a
            policy); otherwise a missing head is an error.
    """
    weights = HuggingFaceWeights(folder)
    check_weights(weights, model, fresh_head=fresh_head)
    rules = all_rules(model.arch, head=model.head)
    layout, rank = model.groups.layout, model.groups.tp_rank
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rule = rules[name]
            if not set(rule.hf) <= weights.names() and name.startswith("output_layer."):
                parameter.zero_()
                continue
            shard = rule.shard(weights, model.arch, layout.tp, rank)
            assert shard.shape == parameter.shape, (name, shard.shape, parameter.shape)
            parameter.copy_(shard)


def gathered_tensors(
    model: ParallelModel, *, dtype: str | None = None,
    value: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach,
) -> Iterator[tuple[str, Tensor | None]]:  # fmt: skip
    """Yields every Hugging Face tensor in order; tensors on global rank 0, None elsewhere.

    All ranks of data parallel replica 0 take part; ranks of other replicas get nothing.

    Args:
        value: what to gather of each parameter: the weight, or its gradient in tests.
    """
    groups, arch = model.groups, model.arch
    if groups.dp_rank != 0:
        return
    mine = dict(model.named_parameters())
    seen: set[str] = set()
    for name, rule in all_rules(arch, head=model.head).items():
        if seen.issuperset(rule.hf):
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
    model: ParallelModel, folder: str | Path, *, source: str | Path | None, dtype: str,
    max_shard_bytes: int = 5 * 2**30,
) -> None:  # fmt: skip
    """Writes a Hugging Face folder that transformers loads strictly.

    Collective over replica 0. The folder appears complete or not at all: it is written beside its
    place and renamed. Tokenizer and generation files are copied from `source`.
    """
    final = Path(folder)
    aside = final.with_name(f".{final.name}.partial")
    writer = _ShardWriter(aside, max_shard_bytes) if dist.get_rank() == 0 else None
    for name, tensor in gathered_tensors(model, dtype=dtype):
        if writer is not None:
            writer.add(name, tensor)
    if writer is None:
        return
    writer.finish()
    _write_companions(model, aside, Path(source) if source else None, dtype)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)


def _write_companions(model: ParallelModel, folder: Path, source: Path | None, dtype: str) -> None:
    long_dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
    config = config_json(model.arch, dtype=long_dtype)
    if source is not None:
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = long_dtype
        for pattern in _COMPANIONS:
            for file in source.glob(pattern):
                shutil.copy2(file, folder / file.name)
    if model.head == "value":
        stem = config["architectures"][0].removesuffix("ForCausalLM")
        config |= {"architectures": [f"{stem}ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class _ShardWriter:
    """Collects tensors into safetensors files of a bounded size, with an index."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.folder, self.max_bytes = folder, max_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self.pending and self.pending_bytes + tensor.nbytes > self.max_bytes:
            self._flush()
        self.pending[name] = tensor.contiguous()
        self.pending_bytes += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self.files)}.safetensors"
        save_file(self.pending, str(path), metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        count, weight_map = len(self.files), {}
        for i, names in enumerate(self.files):
            final = "model.safetensors" if count == 1 else _part_name(i, count)
            (self.folder / f"part-{i}.safetensors").rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2))


def _part_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
