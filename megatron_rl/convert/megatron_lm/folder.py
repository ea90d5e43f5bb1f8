"""A Megatron-LM folder, or one of its iterations, as a model of one role."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoint.cuts import cut_of, pieces
from megatron_rl.convert.companions import companion_files
from megatron_rl.convert.megatron_lm.arguments import architecture_of, get
from megatron_rl.convert.megatron_lm.locate import find_iteration
from megatron_rl.convert.megatron_lm.stores import (
    LegacyStore,
    Store,
    TorchDistStore,
    padded_rows,
)
from megatron_rl.convert.model_folder import (
    OUTPUT_BIAS,
    OUTPUT_WEIGHT,
    TensorInfo,
    head_of,
    listing,
    stored_rules,
)
from megatron_rl.convert.names import Vocabulary


class MegatronLMFolder:
    """The weights of a GPT model that Megatron-LM saved; see `ModelFolder`.

    Args:
        path: the folder with `latest_checkpointed_iteration.txt`, or one iteration's folder.
        role: a critic gets a fresh value head; Megatron-LM's GPT has none.

    Raises:
        ValueError: for a folder of another kind or format, a model that can't be built here (all
            reasons in one list), or a reward model.
    """

    kind = "megatron-lm"

    def __init__(self, path: str | Path, role: str) -> None:
        self.path, self.format = find_iteration(Path(path))
        self.role, self.head = role, head_of(role)
        if role == "reward":
            raise ValueError(
                f"{str(path)!r} is a Megatron-LM folder: its GPT models have no value head, so it "
                "can't be a reward model; give a Hugging Face sequence classifier"
            )
        legacy = self.format == "torch"
        self._store: Store = LegacyStore(self.path) if legacy else TorchDistStore(self.path)
        self.architecture = architecture_of(
            self._store.arguments, source=self._store.arguments_file
        )
        self.fresh_head = self.head == "value"
        self._rules = stored_rules(self.architecture, self.head)
        if isinstance(self._store, LegacyStore):
            self._store.describe(self.architecture, stored_rules(self.architecture, "lm"))
        for name in (OUTPUT_WEIGHT, OUTPUT_BIAS):
            if self.fresh_head:
                self._rules.pop(name)
        self.companion_folder = self._tokenizer_folder()

    def _tokenizer_folder(self) -> Path:
        """The tokenizer saved with the iteration, or where the arguments say it was."""
        own = self.path / "tokenizer"
        named = get(self._store.arguments, "tokenizer_model")
        if own.is_dir() or not isinstance(named, str):
            return own
        place = Path(named)
        return place if place.is_dir() else place.parent if place.is_file() else own

    def check(self) -> None:
        """Compares names and shapes with what the arguments ask for; see `ModelFolder`."""
        found = self._store.tensors
        unused = {OUTPUT_WEIGHT} if self.head == "value" or self.architecture.tied else set()
        missing, extra = set(self._rules) - set(found), set(found) - set(self._rules) - unused
        if missing or extra:
            raise ValueError(
                f"{self.path} does not hold the model that its arguments describe: missing "
                f"{listing(missing)}; unexpected {listing(extra)}"
            )
        for name, rule in self._rules.items():
            shapes = list(rule.shapes(self.architecture).values())
            expected = (sum(s[0] for s in shapes), *shapes[0][1:])
            shape = found[name].shape
            padded = isinstance(rule, Vocabulary) and shape[0] >= expected[0]
            if shape[1:] != expected[1:] or (shape[0] != expected[0] and not padded):
                raise ValueError(
                    f"{name} in {self.path} has shape {shape}, its arguments ask for {expected}"
                )

    @property
    def note(self) -> str:
        """See `ModelFolder`."""
        return (
            f"weights of iteration {self._store.iteration} alone ({self.format}): optimizer state, "
            "schedule and random state start fresh"
        )

    def tensors(self) -> dict[str, TensorInfo]:
        """See `ModelFolder`."""
        return {
            name: padded_rows(rule, self._store.tensors[name], self.architecture)
            for name, rule in self._rules.items()
        }

    def read_into(
        self, name: str, out: Tensor, *, tp: int = 1, rank: int = 0, ep: int = 1
    ) -> None:
        """See `ModelFolder`."""
        rule = self._rules[name]
        cut = cut_of(rule, self.architecture, tuple(out.shape), tp=tp, rank=rank)
        with torch.no_grad():
            if cut.padded:
                out.zero_()
            for piece in pieces(cut, out.view(-1), 0):
                self._store.read(name, piece.data, piece.offset)

    def source_files(self) -> list[Path]:
        """See `ModelFolder`."""
        return self._store.files(self._rules)

    def companions(self) -> dict[str, Path]:
        """The tokenizer's files; a config.json beside them may describe another model."""
        found = companion_files(self.companion_folder)
        return {name: path for name, path in found.items() if name != "config.json"}

    def layout(self) -> dict[str, int]:
        """See `ModelFolder`."""
        sizes = {
            axis: get(self._store.arguments, f"{name}_model_parallel_size", default=1)
            for axis, name in (("tp", "tensor"), ("pp", "pipeline"))
        }
        return {axis: size for axis, size in sizes.items() if size > 1}

    def details(self) -> dict[str, str]:
        """See `ModelFolder`."""
        arguments = self._store.arguments
        layout = {
            "tp": get(arguments, "tensor_model_parallel_size", default=1),
            "pp": get(arguments, "pipeline_model_parallel_size", default=1),
            "cp": get(arguments, "context_parallel_size", default=1),
        }
        rows = self._store.tensors["embedding.word_embeddings.weight"].shape[0]
        cut = rows - self.architecture.vocab
        return {
            "step": str(self._store.iteration), "format": self.format,
            "layout": " ".join(f"{name}={size}" for name, size in layout.items()),
            "vocabulary": f"{rows} rows, {f'{cut} of padding are cut' if cut else 'all kept'}",
            "tokenizer": f"{get(arguments, 'tokenizer_type', default='not named')}, "
            f"{get(arguments, 'tokenizer_model', default='no path')}",
            "optimizer": "not read, starts fresh",
        }  # fmt: skip
