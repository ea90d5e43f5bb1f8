"""The tokenizer that all models of a run share."""

from __future__ import annotations

import hashlib
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

    @property
    def chat_template(self) -> str | None:
        """The template that turns a conversation into text; None: there is none."""
        return self._tokenizer.chat_template

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Ids of `text` as it stands; with the tokenizer's own special tokens if asked for."""
        return self._tokenizer(text, add_special_tokens=special_tokens)["input_ids"]

    def encode_chat(self, messages: list[dict[str, Any]], *, answered: bool = False) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins.

        Args:
            answered: the last message is that answer: the conversation ends with it.
        """
        out = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=not answered, return_dict=True
        )
        return list(out["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; special tokens are left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def fingerprint(self) -> str:
        """Equal for tokenizers that turn every text into the same ids."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            parts = {"class": type(self._tokenizer).__name__, "model": self._tokenizer.get_vocab()}
        else:
            parts = json.loads(backend.to_str())
        kept = {k: parts.get(k) for k in ("class", "added_tokens", "normalizer", "pre_tokenizer",
                                          "model")}  # fmt: skip
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
