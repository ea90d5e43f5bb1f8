"""Writes a folder from which Megatron-LM's tools go on.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000300/     torch_dist with Megatron's names; common.pt holds the command line
    DIR/iter_0000300/tokenizer/
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.folder import write_text
from megatron_rl.convert.companions import copy_companions
from megatron_rl.convert.megatron_lm.arguments import VOCABULARY_MULTIPLE, arguments_of
from megatron_rl.convert.megatron_lm.locate import TRACKER
from megatron_rl.convert.megatron_lm.naming import megatron_lm_name, split_layer
from megatron_rl.convert.model_folder import ModelFolder, TensorInfo, stored_rules
from megatron_rl.convert.names import Vocabulary
from megatron_rl.convert.staging import Advance, PlannedFile
from megatron_rl.convert.torch_dist import Place, TorchDistPlan

_CHECKPOINT_VERSION = 3.0  # order of query, key and value rows
# Modules of Transformer Engine that ask for an FP8 state, which may be empty.
_WITH_STATE = (
    "self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj",
    "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
_NORMS_WITH_STATE = ("self_attention.q_layernorm", "self_attention.k_layernorm")


class MegatronLMPlan:
    """A Megatron-LM folder of one iteration; see `staging.Plan`.

    Args:
        dtype: of all weights; None keeps each tensor's own.
        max_bytes: largest file.

    Raises:
        ValueError: for a model that Megatron-LM's GPT can't be: one with a value head, or with a
            rope scaling that it has no arguments for.
    """

    def __init__(self, source: ModelFolder, *, dtype: torch.dtype | None, max_bytes: int) -> None:
        if source.head == "value":
            raise ValueError(
                f"the {source.role} has a value head, which Megatron-LM's GPT models don't have: "
                "write the actor (--role actor), or a Hugging Face folder (megatron-to-hf)"
            )
        self.source, self.iteration = source, _step(source)
        infos = {
            name: replace(info, dtype=dtype or info.dtype)
            for name, info in source.tensors().items()
        }
        rules = stored_rules(source.architecture, source.head)
        padded = {
            name: _padded(info) if isinstance(rules[name], Vocabulary) else info
            for name, info in infos.items()
        }
        layers = source.architecture.layers
        self._rows = {name: info.shape[0] for name, info in infos.items()}
        self._companions = {k: p for k, p in source.companions().items() if k != "config.json"}
        sizes: dict[torch.dtype, int] = {}
        for info in infos.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        arguments = arguments_of(
            source.architecture, iteration=self.iteration, dtype=max(sizes, key=sizes.get),
            tokenizer=bool(self._companions),
        )  # fmt: skip
        self._tensors = TorchDistPlan(
            {name: _chunk(name, info) for name, info in padded.items()}, self._read,
            max_bytes=max_bytes, prefix=f"iter_{self.iteration:07d}/",
            places={name: _place(name, info, layers) for name, info in padded.items()},
            common={
                "args": arguments, "checkpoint_version": _CHECKPOINT_VERSION,
                "iteration": self.iteration, "num_floating_point_operations_so_far": 0,
            },
            empty_items=_empty_states(layers, qk_norm=source.architecture.qk_norm),
        )  # fmt: skip
        self.files = self._tensors.files

    def _read(self, name: str) -> Tensor:
        info = self._tensors.tensors[name]
        out = torch.zeros(info.shape, dtype=info.dtype)
        whole = out[0] if split_layer(name)[1] is not None else out
        self.source.read_into(name, whole[: self._rows[name]])
        return out

    def write(self, file: PlannedFile, path: Path, advance: Advance) -> dict[str, Any]:
        """See `staging.Plan`."""
        return self._tensors.write(file, path, advance)

    def finish(self, folder: Path, records: dict[str, dict[str, Any]]) -> None:
        """See `staging.Plan`."""
        self._tensors.finish(folder, records)
        copy_companions(self._companions, folder / self._tensors.prefix / "tokenizer")
        write_text(folder / TRACKER, f"{self.iteration}\n")


def _step(source: ModelFolder) -> int:
    """Training steps behind the source, 0 where it does not say."""
    step = source.details().get("step", "")
    return int(step) if step.isdigit() else 0


def _padded(info: TensorInfo) -> TensorInfo:
    rows = -(-info.shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return replace(info, shape=(rows, *info.shape[1:]))


def _chunk(name: str, info: TensorInfo) -> TensorInfo:
    in_layer = split_layer(name)[1] is not None
    return replace(info, shape=(1, *info.shape)) if in_layer else info


def _place(name: str, info: TensorInfo, layers: int) -> Place:
    """Equal layers are one tensor there, with a leading axis."""
    rest, layer = split_layer(name)
    key, zeros = megatron_lm_name(rest), (0,) * len(info.shape)
    if layer is None:
        return Place(key=key, shape=info.shape, offset=zeros)
    return Place(key=key, shape=(layers, *info.shape), offset=(layer, *zeros))


def _empty_states(layers: int, *, qk_norm: bool) -> list[str]:
    """Names of the (empty) FP8 states that a model of Transformer Engine asks for."""
    modules = _WITH_STATE + (_NORMS_WITH_STATE if qk_norm else ())
    found = [
        f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
        for module in modules
        for layer in range(layers)
    ]
    return [*found, "decoder.final_layernorm._extra_state/shard_0_1"]
