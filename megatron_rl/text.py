"""The tokenizer that all models of a run share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError


class TextTokenizer:
    """Text to ids and back, the ids that end a response, and the chat template.

    Raises:
        ConfigError: if the folder has no tokenizer that can be loaded.
    """

    def __init__(self, folder: str | Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"model.tokenizer.path: no tokenizer can be loaded from {str(folder)!r} "
                f"({str(error).splitlines()[0]}); give a folder with tokenizer.json",
                setting="model.tokenizer.path",
            ) from error
        self.end_ids = self._read_end_ids(Path(folder))

    def _read_end_ids(self, folder: Path) -> tuple[int, ...]:
        """Every id that ends a response: the tokenizer's, and those of generation_config.json."""
        ids = {self._tokenizer.eos_token_id}
        path = folder / "generation_config.json"
        if path.is_file():
            listed = json.loads(path.read_text()).get("eos_token_id")
            ids |= set(listed) if isinstance(listed, list) else {listed}
        return tuple(sorted(i for i in ids if i is not None))

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands, without special tokens."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins."""
        out = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return list(out["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; special tokens are left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)
