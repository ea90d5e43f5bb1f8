"""The tokenizer that all models of a run share: Hugging Face's, or a SentencePiece model file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config import ConfigError
from megatron_rl.config.model import TokenizerSettings


class Tokenizer(Protocol):
    """Text to ids and back, the ids that end a response, and the chat template.

    Attributes:
        end_ids: every id that ends a response.
        chat_template: turns a conversation into text; None: there is none.
    """

    end_ids: tuple[int, ...]
    chat_template: str | None

    def __len__(self) -> int: ...

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Ids of `text` as it stands; with the tokenizer's own special tokens if asked for."""

    def encode_chat(self, messages: list[dict[str, Any]], *, answered: bool = False) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins.

        Args:
            answered: the last message is that answer: the conversation ends with it.
        """

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; special tokens are left out."""

    def fingerprint(self) -> str:
        """Equal for tokenizers that turn every text into the same ids."""


def load_tokenizer(
    place: str | Path, settings: TokenizerSettings, *, trust_remote_code: bool = False
) -> Tokenizer:
    """The tokenizer in a folder or file, of the type that the settings name.

    Raises:
        ConfigError: if there is none that can be loaded.
    """
    if settings.type == "sentencepiece":
        from megatron_rl.sentencepiece_text import SentencePieceTokenizer

        return SentencePieceTokenizer(place, settings)
    return TextTokenizer(place, trust_remote_code=trust_remote_code)


class TextTokenizer:
    """A `Tokenizer` from a Hugging Face folder.

    Raises:
        ConfigError: if the folder has no tokenizer that can be loaded.
    """

    def __init__(self, folder: str | Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # noqa: BLE001 - a damaged file raises whatever its parser does
            raise ConfigError(
                f"model.tokenizer.path: no tokenizer can be loaded from {str(folder)!r} "
                f"({first_line(error)}); give a folder with tokenizer.json",
                setting="model.tokenizer.path",
            ) from error
        self.end_ids = all_end_ids(self._tokenizer.eos_token_id, Path(folder))

    @property
    def huggingface_tokenizer(self) -> Any:
        """The tokenizer as transformers' own functions take it."""
        return self._tokenizer

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


def all_end_ids(eos_id: int | None, folder: Path) -> tuple[int, ...]:
    """The ids that end a response: the tokenizer's, and those of the folder's
    generation_config.json."""
    ids = {eos_id}
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            listed = json.loads(path.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path} is not a JSON object ({error}); fetch it again") from error
        ids |= set(listed) if isinstance(listed, list) else {listed}
    return tuple(sorted(i for i in ids if i is not None))


def first_line(error: Exception) -> str:
    """What an error says, shortened to its first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
