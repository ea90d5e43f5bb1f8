"""What a model folder holds, for people (`inspect`) and as settings of a run (`inspect --yaml`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_rl.convert.kinds import Kind, kind_of
from megatron_rl.convert.model_folder import ModelFolder
from megatron_rl.models.architecture import Architecture

_OUR_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def models_in(path: Path) -> tuple[Kind, list[ModelFolder]]:
    """Every model of a folder, checked; a Hugging Face folder holds one.

    Raises:
        ValueError: if the folder is of no known kind, or damaged.
    """
    kind = kind_of(path)
    roles = kind.roles(path)
    folders = [kind.open(path, role, False) for role in (roles[:1] if kind.name == "hf" else roles)]
    for folder in folders:
        folder.check()
    return kind, folders


def facts(kind: Kind, folder: ModelFolder) -> dict[str, str]:
    """Rows of the table of one model."""
    arch = folder.architecture
    infos = folder.tensors()
    nbytes = sum(info.nbytes for info in infos.values())
    head = "vocabulary logits" if folder.head == "lm" else "one value"
    return {
        "folder": f"{folder.path} ({kind.title})",
        "model": f"{arch.family}, {arch.parameters() / 1e6:,.1f} M parameters, {head}",
        "shape": _shape(arch),
        "weights": f"{len(infos)} tensors, {nbytes / 1e9:,.3f} GB, {_dtypes(folder)}",
        "context": f"{arch.max_positions:,} tokens, rope {_rope(arch)}",
        "tied embeddings": "yes" if arch.tied else "no",
        **folder.details(),
        "beside the weights": ", ".join(folder.companions()) or "nothing: no tokenizer",
    }


def _shape(arch: Architecture) -> str:
    experts = ""
    if arch.experts is not None:
        experts = f"{arch.experts.per_token} of {arch.experts.count} experts with "
    return (
        f"{arch.layers} layers, hidden {arch.hidden}, {arch.heads} heads, {arch.kv_heads} KV heads "
        f"of {arch.head_dim}, {experts}feed-forward {arch.ffn}, vocabulary {arch.vocab:,}"
    )


def _rope(arch: Architecture) -> str:
    scaling = "" if arch.rope.kind == "default" else f", {arch.rope.kind} × {arch.rope.factor:g}"
    return f"θ {arch.rope.theta:g}{scaling}"


def _main_dtype(folder: ModelFolder) -> str:
    sizes: dict[Any, int] = {}
    for info in folder.tensors().values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return str(max(sizes, key=sizes.get))


def _dtypes(folder: ModelFolder) -> str:
    found = {str(info.dtype).removeprefix("torch.") for info in folder.tensors().values()}
    return ", ".join(sorted(found))


def settings(folders: list[ModelFolder]) -> str:
    """YAML of a run that starts from the folder: its models, dtype, and the saved layout."""
    roles = {folder.role: {"path": str(folder.path)} for folder in folders}
    values: dict[str, Any] = {
        "model": roles,
        "training": {"dtype": _OUR_DTYPES.get(_main_dtype(folders[0]), "bf16")},
    }
    layout = folders[0].layout()
    if layout:
        values["parallel"] = layout
    longest = min(folder.architecture.max_positions for folder in folders)
    comment = f"# {_shape(folders[0].architecture)}\n# rollout.max_length may be {longest}\n"
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
