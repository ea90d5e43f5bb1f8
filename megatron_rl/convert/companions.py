"""The small files that travel with a model: configuration, tokenizer, chat template, generation."""

from __future__ import annotations

import shutil
from pathlib import Path

_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*",
    "merges.txt", "added_tokens.json", "chat_template*", "additional_chat_templates/*",
    "spiece.model", "sentencepiece*.model", "*.tiktoken",
)  # fmt: skip
_OF_THE_MODEL = ("config.json", "generation_config.json")


def companion_files(folder: Path) -> dict[str, Path]:
    """Files that travel with a model: name inside the folder → path."""
    return {
        str(path.relative_to(folder)): path
        for pattern in _COMPANIONS
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }


def with_tokenizer(companions: dict[str, Path], place: Path) -> dict[str, Path]:
    """A model's companions with the tokenizer from elsewhere instead of its own.

    Args:
        companions: see `companion_files`.
        place: the tokenizer's folder, or its one file (a SentencePiece model, which everybody looks
            for under the name `tokenizer.model`).
    """
    tokenizer = {"tokenizer.model": place} if place.is_file() else companion_files(place)
    # A config.json beside the tokenizer may describe another model.
    tokenizer.pop("config.json", None)
    return tokenizer | {name: companions[name] for name in _OF_THE_MODEL if name in companions}


def copy_companions(companions: dict[str, Path], folder: Path) -> None:
    """Copies what `companion_files` found."""
    for name, path in companions.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
