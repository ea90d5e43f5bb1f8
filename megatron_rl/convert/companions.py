"""The small files that travel with a model: configuration, tokenizer, chat template, generation."""

from __future__ import annotations

import shutil
from pathlib import Path

_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*",
    "merges.txt", "added_tokens.json", "chat_template*", "additional_chat_templates/*",
    "spiece.model", "sentencepiece*.model", "*.tiktoken",
)  # fmt: skip


def companion_files(folder: Path) -> dict[str, Path]:
    """Files that travel with a model: name inside the folder → path."""
    return {
        str(path.relative_to(folder)): path
        for pattern in _COMPANIONS
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }


def copy_companions(companions: dict[str, Path], folder: Path) -> None:
    """Copies what `companion_files` found."""
    for name, path in companions.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
